"""The HTTP edge in the form of OpenAI's API: schema, answers, errors, server."""
