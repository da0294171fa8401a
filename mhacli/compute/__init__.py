"""What the tool can do, each a function from config and text to a record. torch enters here."""
