"""One file per command: options in, one study, one renderer. Nothing here imports torch before its body runs."""
