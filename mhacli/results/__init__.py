"""The results of commands: records, differences, benchmarks and reports."""
