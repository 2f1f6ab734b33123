"""What the figures show, computed without Streamlit or Plotly."""
