"""The parts of an SVG picture: elements, axes, cells and scales."""
