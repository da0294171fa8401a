"""Parts of every view: number formats, colours, tables and options."""
