"""Parts of pages: a heading, a verdict, a figure and the controls that belong to it."""
