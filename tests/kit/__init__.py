"""The shared parts of the tests: sample applications, servers, views of rows, statements on the wire, and faults."""
