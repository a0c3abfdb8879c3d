"""The questions of operators about notifications and events."""
