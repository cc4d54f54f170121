#!/usr/bin/env bash
# Prints the commands that tag and upload what `make release` left in dist/. It runs none of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
wheel=(dist/edge_mtp-"$version"-*.whl)
[ -f "${wheel[0]}" ] || { echo "dist/ has no wheel of version $version; run make release first" >&2; exit 1; }
if ! grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md; then
    echo "CHANGELOG.md has no dated head for $version: write '## $version ($(date +%F))', commit, and run make release again. Then:"
fi
cat <<EOF
git tag --sign v$version --message "edge-mtp $version"
git push origin v$version                     # .github/workflows/release.yml builds it again and publishes dist/ there
uv publish dist/edge_mtp-$version*            # source archive and wheel to PyPI; UV_PUBLISH_TOKEN holds the token
EOF
