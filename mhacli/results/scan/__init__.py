"""What `mha scan` found: units of documents, the folder that they lie in, and the corpus as one record."""
