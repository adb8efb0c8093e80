"""Following an engine through its publish socket: messages in, the state that a dashboard shows out."""
