"""Tables of rows: cells by seed, as text, Markdown, LaTeX and CSV, beside what the paper prints."""
