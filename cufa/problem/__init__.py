"""What is computed: shapes, elements, masks, lengths, options, and the work that they make. Imports nothing of cufa."""
