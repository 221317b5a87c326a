"""How a selection travels: every worker's selected elements of a bucket become one sum on all of them."""
