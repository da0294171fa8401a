"""The command line: the application, its options and streams, and one file for each command."""
