"""`%playground`: a prompt is edited and asked with two settings side by side."""
