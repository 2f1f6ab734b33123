"""The script that Streamlit runs for each visitor: the sidebar and the requested page."""

from pathlib import Path

import streamlit as st

from cufa.commands.dashboard import make_importable

make_importable()

from cufa.dashboard import glossary  # noqa: E402 - importable after make_importable()

#: File under ``screens``, title and icon of each page, in the order of the sidebar. Pages are files because Streamlit's
#: AppTest can only switch to files. The folder is not named ``pages``: Streamlit would run its files without this
#: script when a browser opens one of them first.
PAGES = (
    ("understand", "Understand", "school"),
    ("exercises", "Exercises", "fitness_center"),
    ("run", "Run", "play_arrow"),
    ("masked_work", "Masked work", "grid_on"),
    ("compare", "Compare", "show_chart"),
    ("occupancy", "Occupancy", "stacks"),
    ("machine_code", "Machine code", "code"),
    ("roofline", "Roofline", "roofing"),
    ("decode", "Decode", "call_split"),
    ("parallel", "Several GPUs", "hub"),
    ("history", "History", "history"),
    ("doctor", "Doctor", "stethoscope"),
)

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
