"""Layer similarity and guidance scale of trained models, stored beside their runs."""
