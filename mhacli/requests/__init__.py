"""The requests of the commands, validated and resolved once."""
