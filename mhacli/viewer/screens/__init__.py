"""The screens of the viewer, and the state that they share."""
