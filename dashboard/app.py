"""The script that Streamlit runs for each visitor: the sidebar and the requested page."""

from pathlib import Path

import streamlit as st

from cufa.commands.dashboard import make_importable

make_importable()

from cufa.dashboard import PAGES, glossary  # noqa: E402 - importable after make_importable()

ICON = str(Path(__file__).with_name("icon.svg"))

st.set_page_config(page_title="cufa", page_icon=ICON, layout="wide")
st.logo(ICON, size="large")
pages = [
    st.Page(f"screens/{name}.py", title=title, icon=f":material/{icon}:", default=not position)
    for position, (name, title, icon) in enumerate(PAGES)
]
page = st.navigation(pages)
with st.sidebar.popover("Glossary", type="tertiary", icon=":material/menu_book:"):
    st.markdown(glossary.as_markdown())
st.set_page_config(page_title=f"{page.title} · cufa")
page.run()
