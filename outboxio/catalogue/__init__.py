"""The event catalogue: exports event types as an AsyncAPI document, and detects changes that break readers."""
