"""`predict`: what a route saves or costs in a full run, from pairs of short ones."""
