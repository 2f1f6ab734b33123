"""From a plan's constants to machine code: translation units, static compiles, and what their listings show."""
