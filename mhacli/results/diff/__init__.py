"""Two records beside each other: where they first depart, and what changes in each head. Numpy alone."""
