"""The results of `mha scan`: units of documents, their folder, and statistics over the corpus."""
