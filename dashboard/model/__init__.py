"""Data of the figures, without Streamlit or Plotly."""
