"""What was found: records, differences, benchmarks and reports."""
