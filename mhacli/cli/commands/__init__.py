"""One module per command: options, one computation, one renderer. None imports torch before the command runs."""
