"""What OpenAI's requests ask for, whoever brings them: a server or a file of lines. Layer 7.

Owns the members of bodies: their names, ranges and refusals, the schema that documents them, and what they
become for an engine. Knows neither HTTP nor files, and needs no package of an extra.
"""
