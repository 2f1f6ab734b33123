"""The dashboard's entry point: ``cufa dashboard``, or ``streamlit run dashboard/app.py``."""

from pathlib import Path

import streamlit as st

from cufa.commands.dashboard import make_importable

make_importable()

#: File under ``pages``, title, icon: the sidebar, in this order. Pages are files, not functions, because
#: Streamlit's AppTest can only switch to files.
PAGES = (("causal_work", "Causal work", "grid_on"),)

ICON = str(Path(__file__).with_name("icon.svg"))

st.set_page_config(page_title="cufa", page_icon=ICON, layout="wide")
st.logo(ICON, size="large")
pages = [
    st.Page(f"pages/{name}.py", title=title, icon=f":material/{icon}:", url_path=name, default=not position)
    for position, (name, title, icon) in enumerate(PAGES)
]
st.navigation(pages).run()
