#!/usr/bin/env python3
"""What a program or a library is made of: crates with their licences.

sbom.py --check [CRATE]             every licence is one that deny.toml allows
sbom.py FOLDER TARGET [CRATE...]    zebu.cdx.json (CycloneDX 1.5) and THIRD-PARTY.txt with the licences' texts

CRATE is the folder of a crate, zebu-cli by default, and may be followed by options of Cargo that choose
features. The crates are those that are linked into it for TARGET, and those that its build runs.
"""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What is linked besides the crates; the texts are in packaging/licenses.
RUST = {"rust": "the Rust standard library: MIT OR Apache-2.0"}
# By scripts/static.sh, too.
STATIC = {
    "musl": "musl: MIT",
    "zig": "zig's parts of the C library and of the compiler's runtime: MIT",
    "libunwind": "LLVM's libunwind: Apache-2.0 WITH LLVM-exception",
}
NAMES = re.compile(r"(?i)^(licen[cs]e|copying|copyright|notice|unlicense)([-._].*)?$")


def cargo(command, *arguments):
    words = ["cargo", command, "--locked", *arguments]
    return subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def crates(targets, crate="zebu-cli", *options):
    """The packages below a crate by id, which of them are linked, and the dependencies of each."""
    manifest = ROOT / crate / "Cargo.toml"
    platforms = [word for target in targets for word in ("--filter-platform", target)]
    data = json.loads(cargo("metadata", "--format-version", "1", "--manifest-path", manifest, *platforms))
    # Of a workspace that has the features of all its crates.
    tree = ["tree", "--manifest-path", manifest, "--prefix", "none", "--edges", "no-dev", *options]
    trees = [cargo(*tree, "--target", target) for target in targets]
    built = {tuple(line.split()[:2]) for text in trees for line in text.splitlines()}
    packages = {package["id"]: package for package in data["packages"]}
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    linked, needs = {}, {}
    root = next(key for key, package in packages.items() if package["manifest_path"] == str(manifest))
    todo = [(root, True)]
    while todo:
        key, is_linked = todo.pop()
        if linked.get(key) or (key in linked and not is_linked):
            continue
        linked[key] = is_linked
        is_macro = any("proc-macro" in target["kind"] for target in packages[key]["targets"])
        needs[key] = []
        for dependency in nodes[key]["deps"]:
            kinds = {kind["kind"] for kind in dependency["dep_kinds"]} - {"dev"}
            other = packages[dependency["pkg"]]
            if not kinds or (other["name"], f"v{other['version']}") not in built:
                continue
            needs[key].append(dependency["pkg"])
            todo.append((dependency["pkg"], is_linked and not is_macro and None in kinds))
    return packages, linked, needs, root


def is_allowed(expression, allowed):
    """Whether a licence expression can be met by allowed licences."""
    words = re.findall(r"\(|\)|[^\s()/]+|/", expression)

    def either():
        value = both()
        while words and words[0] in ("OR", "/"):
            words.pop(0)
            value = both() or value
        return value

    def both():
        value = one()
        while words and words[0] == "AND":
            words.pop(0)
            value = one() and value
        return value

    def one():
        word = words.pop(0)
        if word == "(":
            value = either()
            words.pop(0)
            return value
        if words and words[0] == "WITH":
            del words[:2]
        return word in allowed

    return either()


def rule(name):
    """A list of strings in deny.toml."""
    found = re.search(rf"^{name} = \[(.*?)\]", (ROOT / "deny.toml").read_text(), re.DOTALL | re.MULTILINE)
    return re.findall('"(.*?)"', found[1])


def check(*crate):
    allowed = set(rule("allow"))
    packages, linked, _, _ = crates(rule("targets"), *crate)
    bad = []
    for key in linked:
        package = packages[key]
        if not is_allowed(package["license"] or "none", allowed):
            bad.append(f"{package['name']} {package['version']}: {package['license']}")
    print("\n".join(sorted(bad)) or f"the licences of {len(linked)} crates are allowed")
    return 1 if bad else 0


def checksums(root):
    """The hashes of crates by name and version, of the lock file nearest to a crate."""
    folders = pathlib.Path(root["manifest_path"]).parents
    lock = next(path for path in (folder / "Cargo.lock" for folder in folders) if path.exists())
    fields = [dict(re.findall(r'^(\w+) = "(.*)"$', part, re.MULTILINE)) for part in lock.read_text().split("[[package]]")]
    return {(one.get("name"), one.get("version")): one.get("checksum") for one in fields}


def cyclonedx(packages, linked, needs, root):
    sums = checksums(packages[root])

    def purl(key):
        return f"pkg:cargo/{packages[key]['name']}@{packages[key]['version']}"

    def component(key, kind):
        package = packages[key]
        result = {
            "type": kind,
            "bom-ref": purl(key),
            "name": package["name"],
            "version": package["version"],
            "scope": "required" if linked[key] else "excluded",
            "licenses": [{"expression": package["license"].replace("/", " OR ")}],
            "purl": purl(key),
        }
        checksum = sums.get((package["name"], package["version"]))
        if checksum:
            result["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        if package["repository"]:
            result["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
        return result

    order = sorted(linked, key=purl)
    content = {
        "components": [component(key, "library") for key in order if key != root],
        "dependencies": [
            {"ref": purl(key), "dependsOn": sorted({purl(other) for other in needs[key]})} for key in order
        ],
    }
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "component": component(root, "application" if packages[root]["name"] == "zebu-cli" else "library"),
        },
        **content,
    }


def texts(package):
    """The licence files of a crate, those of C sources that it brings among them."""
    folder = pathlib.Path(package["manifest_path"]).parent
    for parent, folders, names in os.walk(folder):
        depth = len(pathlib.Path(parent).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if depth < 3 and name not in ("target", "tests"))
        for name in sorted(names):
            if NAMES.match(name) and not name.endswith((".rs", ".c", ".h", ".py")):
                path = pathlib.Path(parent, name)
                yield str(path.relative_to(folder)), path.read_text(errors="replace").strip()


def third_party(packages, linked, root):
    """The texts, each once, after the files that have it."""
    users = {}
    toolchain = {**RUST, **STATIC} if packages[root]["name"] == "zebu-cli" else RUST
    lines = [f"{packages[root]['name']} is linked with:", "", *toolchain.values()]
    for name, what in toolchain.items():
        users[(ROOT / f"packaging/licenses/{name}.txt").read_text().strip()] = [what]
    for key in sorted(linked, key=lambda key: packages[key]["name"]):
        package = packages[key]
        if not linked[key] or package["source"] is None:
            continue
        name = f"{package['name']} {package['version']}"
        lines.append(f"{name}: {package['license']}")
        found = list(texts(package))
        for file, text in found:
            users.setdefault(text, []).append(f"{name}: {file}")
        if not found and is_allowed(package["license"], {"Apache-2.0"}):
            text = (ROOT / "LICENSE-APACHE").read_text().strip()
            users.setdefault(text, []).append(f"{name}, which comes without a text: Apache-2.0")
    for text, names in users.items():
        lines += ["", "-" * 100, *names, "", text]
    return "\n".join(lines) + "\n"


def main():
    if sys.argv[1] == "--check":
        return check(*sys.argv[2:])
    folder, target, *crate = sys.argv[1:]
    packages, linked, needs, root = crates([target], *crate)
    out = pathlib.Path(folder)
    bom = cyclonedx(packages, linked, needs, root)
    name = packages[root]["name"].removesuffix("-cli")
    (out / f"{name}.cdx.json").write_text(json.dumps(bom, indent=1) + "\n")
    (out / "THIRD-PARTY.txt").write_text(third_party(packages, linked, root))
    return 0


sys.exit(main())
