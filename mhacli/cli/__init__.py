"""What is typed: the application, options, streams, and one file for each command."""
