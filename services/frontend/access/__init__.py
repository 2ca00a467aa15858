"""Who may use the frontend, and how much: API keys, token rates, requests at a time."""
