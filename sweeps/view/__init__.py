"""Where the runs of a sweep are: status table and details."""
