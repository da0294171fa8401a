"""Pictures for papers and pages: a head, a grid of heads, or the walkthrough, as SVG text that needs nothing beside itself."""
