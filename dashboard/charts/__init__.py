"""Figures as functions: data in, Plotly figure out. Nothing here imports Streamlit."""
