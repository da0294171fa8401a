"""What every view uses: numbers as text, colours, tables and options."""
