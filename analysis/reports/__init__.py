"""HTML report, Markdown pages and notebooks, and the sentences in them."""
