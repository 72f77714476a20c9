"""A module whose names the rows of the tables read and change."""

CONSTANT = 2.0
UNRELATED = 0


def function(x):
    return x * 2
