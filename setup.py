"""What pyproject.toml cannot say: the project's addresses, from one, and README with absolute links
for the package index."""

import re
from pathlib import Path

from setuptools import setup

URL = "https://github.com/attnops/attnops"
"""Where the project is published. Set it here when that changes; tests/test_packaging.py finds the
other files that name it."""

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
readme = re.sub(r'(!\[[^]]*\]\(|src(?:set)?=")(?!https?:)', rf"\1{URL}/raw/HEAD/", readme)
readme = re.sub(r'(\]\(|href=")(?!https?:|#)', rf"\1{URL}/blob/HEAD/", readme)

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls={
        "Homepage": URL,
        "Documentation": f"{URL}/blob/HEAD/docs/index.md",
        "Source": URL,
        "Issues": f"{URL}/issues",
        "Changelog": f"{URL}/blob/HEAD/CHANGELOG.md",
    },
)
