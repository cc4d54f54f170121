"""What a terminal shows and reads: figures, Markdown, typed and pasted lines."""
