"""Renames names, members and parameters of all packages at once, from maps in JSON: `python rename.py MAP.json ... [--write]`.

{"aerie.rollout.plan": {"names": {"Old": "New"}, "members": {"Class.old": "new"}, "params": {"function.old": "new"}}}, keyed by the old names. Names are
resolved by scope and imports, members and keywords by mypy's types. Not reached: aliased imports keep their alias, strings (monkeypatch, __slots__,
TypeVar, getattr), keywords of st.builds and of dictionaries that are spread.
"""

import ast, json, glob, os, sys, collections, subprocess, re, pickle

ROOT = subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip()
os.chdir(ROOT)
maps = collections.defaultdict(lambda: {"names": {}, "members": {}, "params": {}})
for f in sys.argv[1:]:
    if f.startswith("--"):
        continue
    for m, k in json.load(open(f)).items():
        for kind in ("names", "members", "params"):
            maps[m][kind].update({o: n for o, n in k.get(kind, {}).items() if o.split(".")[-1] != n})
NAMES = {f"{m}.{o}": n for m, k in maps.items() for o, n in k["names"].items()}
MEMBERS = {f"{m}.{o}": n for m, k in maps.items() for o, n in k["members"].items()}  # full class name . member
PARAMS = {f"{m}.{o}": n for m, k in maps.items() for o, n in k["params"].items()}


def modname(p):
    for r in ("operator/", "drafter/", "lab/"):
        if p.startswith(r):
            p = p[len(r) :]
            break
    p = p[:-3].replace("/", ".")
    return p[:-9] if p.endswith(".__init__") else p


files = [
    f
    for f in subprocess.check_output(["git", "ls-files", "*.py"], text=True).split("\n")
    if f and not f.startswith("lab/aerie_lab/binaries/addons")
]
MODS = {modname(f): f for f in files}
edits = collections.defaultdict(dict)
problems = []


def edit(f, line, c0, c1, new, old, why):
    k = (line, c0, c1)
    h = edits[f].get(k)
    if h and h[0] != new:
        problems.append(f"{f}:{line}:{c0} {old}: {h[0]} or {new} ({why})")
        return
    edits[f][k] = (new, old)


srcs = {f: open(f, encoding="utf-8").read() for f in files}
trees = {f: ast.parse(s) for f, s in srcs.items()}
blines = {f: [l.encode() for l in s.split("\n")] for f, s in srcs.items()}


# re-exports: module attribute resolution
def toplevel(tree):
    out = set()
    for s in ast.walk(tree):
        pass

    def body(b):
        for s in b:
            if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                out.add(s.name)
            elif isinstance(s, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                for t in s.targets if isinstance(s, ast.Assign) else [s.target]:
                    for x in ast.walk(t):
                        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                            out.add(x.id)
            elif isinstance(s, (ast.If, ast.Try, ast.With, ast.For)):
                body(getattr(s, "body", []))
                body(getattr(s, "orelse", []))
                body(getattr(s, "finalbody", []))
                if isinstance(s, ast.For):
                    for x in ast.walk(s.target):
                        if isinstance(x, ast.Name):
                            out.add(x.id)

    body(tree.body)
    return out


TOP = {m: toplevel(trees[f]) for m, f in MODS.items()}


def resolve(mod, name, depth=0):
    """Full name of what `name` is in module `mod`."""
    if depth > 6:
        return None
    if name in TOP.get(mod, ()):
        return f"{mod}.{name}"
    if f"{mod}.{name}" in MODS:
        sub = f"{mod}.{name}"
    else:
        sub = None
    f = MODS.get(mod)
    if not f:
        return None
    for s in trees[f].body:
        if isinstance(s, ast.ImportFrom) and s.level == 0 and s.module:
            for a in s.names:
                if (a.asname or a.name) == name:
                    return resolve(s.module, a.name, depth + 1) or (
                        f"{s.module}.{a.name}" if f"{s.module}.{a.name}" in MODS else None
                    )
    return sub


class Names(ast.NodeVisitor):
    def __init__(self, f):
        self.f = f
        self.mod = modname(f)
        self.stack = [{}]  # name -> fullname or None (local)
        self.glob = {n: f"{self.mod}.{n}" for n in TOP[self.mod]}
        for s in ast.walk(trees[f]):
            if isinstance(s, ast.ImportFrom) and s.level == 0 and s.module:
                for a in s.names:
                    full = resolve(s.module, a.name) or f"{s.module}.{a.name}"
                    self.glob.setdefault(a.asname or a.name, full)
            elif isinstance(s, ast.Import):
                for a in s.names:
                    if a.asname:
                        self.glob[a.asname] = a.name
                    else:
                        self.glob[a.name.split(".")[0]] = a.name.split(".")[0]
        self.visit(trees[f])

    def look(self, n):
        for sc in reversed(self.stack):
            if n in sc:
                return None
        return self.glob.get(n)

    def locals_of(self, node, args=True):
        out = set()
        glb = set()
        if args:
            a = node.args
            for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
                if x:
                    out.add(x.arg)

        def walk(n):
            for c in ast.iter_child_nodes(n):
                if isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    out.add(c.name)
                    continue
                if isinstance(c, ast.Lambda):
                    continue
                if isinstance(c, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                    for x in ast.walk(c):
                        if isinstance(x, ast.NamedExpr):
                            out.add(x.target.id)
                    continue
                if isinstance(c, ast.Global):
                    glb.update(c.names)
                if isinstance(c, ast.Name) and isinstance(c.ctx, (ast.Store, ast.Del)):
                    out.add(c.id)
                if isinstance(c, ast.ExceptHandler) and c.name:
                    out.add(c.name)
                if isinstance(c, (ast.MatchAs, ast.MatchStar)) and c.name:
                    out.add(c.name)
                walk(c)

        body = node.body if isinstance(node.body, list) else [node.body]
        for s in body:
            w = ast.Module(body=[s], type_ignores=[])
            walk(w)
        return {n: None for n in out - glb}

    def visit_ImportFrom(self, s):
        if s.level or not s.module:
            return
        for a in s.names:
            full = resolve(s.module, a.name)
            if full in NAMES:
                # position of alias
                edit(self.f, a.lineno, a.col_offset, a.col_offset + len(a.name.encode()), NAMES[full], a.name, "import")

    def func(self, n):
        for d in n.decorator_list:
            self.visit(d)
        a = n.args
        for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
            if x and x.annotation:
                self.visit(x.annotation)
        for d in [*a.defaults, *[k for k in a.kw_defaults if k]]:
            self.visit(d)
        if n.returns:
            self.visit(n.returns)
        if len(self.stack) == 1 and not getattr(self, "cls", 0):
            full = f"{self.mod}.{n.name}"
            if full in NAMES:
                self.header(n, n.name, NAMES[full])
        cls, self.cls = getattr(self, "cls", 0), 0
        self.stack.append(self.locals_of(n))
        for s in n.body:
            self.visit(s)
        self.stack.pop()
        self.cls = cls

    def header(self, n, old, new):
        for l in range(n.lineno, n.lineno + 3):
            b = blines[self.f][l - 1]
            m = re.search((r"\b(?:def|class)\s+(" + re.escape(old) + r")\b").encode(), b)
            if m:
                edit(self.f, l, m.start(1), m.end(1), new, old, "def")
                return

    visit_FunctionDef = visit_AsyncFunctionDef = func

    def visit_ClassDef(self, n):
        for d in [*n.decorator_list, *n.bases, *[k.value for k in n.keywords]]:
            self.visit(d)
        if len(self.stack) == 1:
            full = f"{self.mod}.{n.name}"
            if full in NAMES:
                self.header(n, n.name, NAMES[full])
        cls, self.cls = getattr(self, "cls", 0), 1
        for s in n.body:
            self.visit(s)
        self.cls = cls

    def visit_Lambda(self, n):
        for d in [*n.args.defaults, *[k for k in n.args.kw_defaults if k]]:
            self.visit(d)
        self.stack.append(self.locals_of(n))
        self.visit(n.body)
        self.stack.pop()

    def comp(self, n):
        loc = {}
        for g in n.generators:
            for x in ast.walk(g.target):
                if isinstance(x, ast.Name):
                    loc[x.id] = None
        self.visit(n.generators[0].iter)
        self.stack.append(loc)
        for i, g in enumerate(n.generators):
            if i:
                self.visit(g.iter)
            for c in g.ifs:
                self.visit(c)
        for fld in ("elt", "key", "value"):
            if hasattr(n, fld):
                self.visit(getattr(n, fld))
        self.stack.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comp

    def visit_Name(self, n):
        # class-level annotated fields of the same name as a module name: stores in class bodies are members
        if getattr(self, "cls", 0) and isinstance(n.ctx, ast.Store):
            return
        full = self.look(n.id)
        if full in NAMES:
            edit(self.f, n.lineno, n.col_offset, n.end_col_offset, NAMES[full], n.id, "name")

    def visit_Attribute(self, n):
        parts = []
        x = n
        while isinstance(x, ast.Attribute):
            parts.append(x.attr)
            x = x.value
        if isinstance(x, ast.Name):
            base = self.look(x.id)
            if base:
                cur = base
                chain = [n]
                y = n
                while isinstance(y.value, ast.Attribute):
                    y = y.value
                    chain.append(y)
                for node in reversed(chain):
                    if cur in MODS or any(m.startswith(cur + ".") for m in MODS):
                        nxt = resolve(cur, node.attr) or (
                            f"{cur}.{node.attr}"
                            if f"{cur}.{node.attr}" in MODS or any(m.startswith(f"{cur}.{node.attr}.") for m in MODS)
                            else None
                        )
                        if nxt in NAMES:
                            edit(
                                self.f,
                                node.end_lineno,
                                node.end_col_offset - len(node.attr.encode()),
                                node.end_col_offset,
                                NAMES[nxt],
                                node.attr,
                                "attr",
                            )
                        cur = nxt or ""
                    else:
                        break
        self.generic_visit(n)

    def visit_Constant(self, n):
        pass


for f in files:
    Names(f)
# __all__ strings
for f in files:
    mod = modname(f)
    for s in trees[f].body:
        if isinstance(s, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in s.targets):
            for e in ast.walk(s.value):
                if isinstance(e, ast.Constant) and isinstance(e.value, str):
                    full = resolve(mod, e.value)
                    if full in NAMES:
                        edit(f, e.lineno, e.col_offset + 1, e.end_col_offset - 1, NAMES[full], e.value, "all")
print("names done", sum(map(len, edits.values())), flush=True)
# ---------------------------------------------------------------- mypy
from mypy import build, nodes, types as T
from mypy.options import Options
from mypy.config_parser import parse_config_file
from mypy.find_sources import create_source_list

SKIP = {
    "node",
    "info",
    "type",
    "unanalyzed_type",
    "definition",
    "analyzed",
    "names",
    "imports",
    "alias_deps",
    "type_args_",
    "unanalyzed_args",
    "original_def",
    "expanded",
    "original_first_arg",
    "inferred_type",
    "target_type",
    "variables",
    "tvars",
}
_attrs = {}


def attrs(c):
    if c not in _attrs:
        out = []
        for k in c.__mro__:
            out += list(getattr(k, "__mypyc_attrs__", ()) or ())
        _attrs[c] = [a for a in dict.fromkeys(out) if a not in SKIP and not a.startswith("_")]
    return _attrs[c]


class TraverserVisitor:
    def visit_mypy_file(self, f):
        self.seen = set()
        for d in f.defs:
            self.go(d)

    def go(self, v):
        if isinstance(v, (list, tuple)):
            for x in v:
                self.go(x)
        elif isinstance(v, dict):
            for x in v.values():
                self.go(x)
        elif isinstance(v, nodes.Node) and not isinstance(v, (nodes.TypeInfo, nodes.SymbolTableNode, nodes.Var)):
            if id(v) in self.seen:
                return
            self.seen.add(id(v))
            m = getattr(self, HOOK.get(type(v).__name__, ""), None)
            if m:
                m(v)
            else:
                self.children(v)

    def children(self, v):
        for a in attrs(type(v)):
            try:
                x = getattr(v, a)
            except Exception:
                continue
            if x is not None and not isinstance(x, (str, int, bool, float)):
                self.go(x)

    def __getattr__(self, n):
        if n.startswith("visit_"):
            return self.children
        raise AttributeError(n)


HOOK = {
    "MemberExpr": "visit_member_expr",
    "SuperExpr": "visit_super_expr",
    "CallExpr": "visit_call_expr",
    "ClassPattern": "visit_class_pattern",
    "ClassDef": "visit_class_def",
    "FuncDef": "visit_func_def",
    "NameExpr": "visit_name_expr",
    "AssignmentStmt": "visit_assignment_stmt",
}
opt = Options()
parse_config_file(opt, lambda: None, "pyproject.toml", sys.stdout, sys.stderr)
opt.export_types = True
opt.preserve_asts = True
opt.incremental = False
opt.python_executable = ROOT + "/.venv/bin/python"
opt.fine_grained_incremental = False
opt.cache_dir = os.devnull
opt.allow_redefinition = False
from mypy.fscache import FileSystemCache
import mypy.main as mm

sources, opt2 = mm.process_options(["--no-incremental", "--export-types"] if False else [], fscache=FileSystemCache())
opt2.export_types = True
opt2.preserve_asts = True
opt2.incremental = False
opt2.cache_dir = os.devnull
opt2.warn_unused_ignores = False
res = build.build(sources, opt2)
print("mypy errors", len(res.errors), res.errors[:3], flush=True)
TYPES = res.types


def infos(t, depth=0):
    """TypeInfos whose attribute a member access on t reads."""
    t = T.get_proper_type(t) if t is not None else None
    if t is None or depth > 5:
        return []
    if isinstance(t, T.Instance):
        return [t.type]
    if isinstance(t, T.UnionType):
        return [i for x in t.items for i in infos(x, depth + 1)]
    if isinstance(t, T.TypeType):
        return infos(t.item, depth + 1)
    if isinstance(t, T.CallableType) and t.is_type_obj():
        return [t.type_object()]
    if isinstance(t, T.Overloaded) and t.items and t.items[0].is_type_obj():
        return [t.items[0].type_object()]
    if isinstance(t, T.TupleType):
        return infos(t.partial_fallback, depth + 1)
    if isinstance(t, (T.TypeVarType,)):
        return infos(t.upper_bound, depth + 1)
    if isinstance(t, T.LiteralType):
        return infos(t.fallback, depth + 1)
    return []


def member_new(info, name):
    for c in info.mro:
        n = MEMBERS.get(f"{c.fullname}.{name}")
        if n:
            return n
    return None


def param_new(fn_full, name):
    return PARAMS.get(f"{fn_full}.{name}")


class V(TraverserVisitor):
    def __init__(self, f):
        self.f = f
        self.cls = []
        self.vars = {}

    def at_end(self, node, name, new, why):
        l, c = node.end_line, node.end_column
        b = blines[self.f][l - 1]
        # mypy columns are of characters? they come from ast: bytes offsets
        if b[c - len(name) : c].decode(errors="replace") == name:
            edit(self.f, l, c - len(name), c, new, name, why)
        else:
            problems.append(f"{self.f}:{l}: {name} not at end: {b[max(0, c - 30) : c]!r}")

    def visit_member_expr(self, o):
        t = TYPES.get(o.expr)
        news = set()
        for i in infos(t):
            n = member_new(i, o.name)
            news.add(n)
        real = news - {None}
        if real:
            if len(news) > 1:
                problems.append(f"{self.f}:{o.line}: {o.name} in a union: {news}")
            self.at_end(o, o.name, sorted(real)[0], "member")
        self.children(o)

    def visit_super_expr(self, o):
        if o.info:
            n = member_new(o.info, o.name)
            if n:
                self.at_end(o, o.name, n, "super")
        self.children(o)

    def visit_call_expr(self, o):
        if any(o.arg_names):
            t = T.get_proper_type(TYPES.get(o.callee)) if TYPES.get(o.callee) is not None else None
            look = []
            if isinstance(o.callee, nodes.RefExpr) and o.callee.fullname == "dataclasses.replace" and o.args:
                look += [("m", i) for i in infos(TYPES.get(o.args[0]))]
            elif isinstance(o.callee, nodes.RefExpr) and o.callee.fullname == "functools.partial" and o.args:
                tt = T.get_proper_type(TYPES.get(o.args[0])) if TYPES.get(o.args[0]) is not None else None
                look += self.callee(tt)
            else:
                look += self.callee(t)
            # positions of keywords: from ast
            for kw in KW.get((self.f, o.line, o.column), ()):
                pass
            for kind, x in look:
                for nm in [n for n in o.arg_names if n]:
                    new = member_new(x, nm) if kind == "m" else param_new(x, nm)
                    if kind == "m" and new is None:
                        for c in x.mro:
                            new = new or param_new(f"{c.fullname}.__init__", nm)
                    if new:
                        self.kw(o, nm, new)
        self.children(o)

    def callee(self, t):
        out = []
        if isinstance(t, T.CallableType):
            if t.is_type_obj():
                out.append(("m", t.type_object()))
            d = t.definition
            if d is not None:
                fn = d.func if isinstance(d, nodes.Decorator) else d
                if getattr(fn, "fullname", None):
                    out.append(("p", fn.fullname))
        elif isinstance(t, T.Overloaded):
            for i in t.items:
                out += self.callee(i)
        elif isinstance(t, T.UnionType):
            for i in t.items:
                out += self.callee(T.get_proper_type(i))
        elif isinstance(t, T.TypeType):
            out += [("m", i) for i in infos(t)]
        elif isinstance(t, T.Instance):
            out.append(("p", t.type.fullname + ".__call__"))
        return out

    def kw(self, o, name, new):
        for l, c, nm in KW.get((self.f, o.line, o.column, o.end_line, o.end_column), ()):
            if nm == name:
                edit(self.f, l, c, c + len(name), new, name, "keyword")

    def visit_class_pattern(self, o):
        if o.class_ref.node is not None and isinstance(o.class_ref.node, nodes.TypeInfo):
            for nm in o.keyword_keys:
                n = member_new(o.class_ref.node, nm)
                if n:
                    problems.append(f"{self.f}:{o.line}: pattern keyword {nm} -> {n}")
        self.children(o)

    def visit_class_def(self, o):
        self.cls.append(o.info)
        self.children(o)
        self.cls.pop()

    def visit_func_def(self, o):
        full = o.fullname
        if o.info:
            n = member_new(o.info, o.name)
            if n:
                self.deff(o, o.name, n)
        for a in o.arguments:
            nm = a.variable.name
            new = param_new(full, nm)
            if new is None and o.name == "__init__":
                pass
            if new:
                self.vars[id(a.variable)] = new
                self.argpos(a, nm, new)
        self.children(o)

    def argpos(self, a, nm, new):
        l, c = a.variable.line, a.variable.column
        l = a.line if l < 0 else l
        c = a.column if c < 0 else c
        b = blines[self.f][l - 1]
        for off in (0, 1, 2):
            if b[c + off : c + off + len(nm)].decode(errors="replace") == nm:
                edit(self.f, l, c + off, c + off + len(nm), new, nm, "param")
                return
        problems.append(f"{self.f}:{l}: parameter {nm} not at {c}: {b!r}")

    def deff(self, o, old, new):
        for l in range(o.line, o.line + 4):
            m = re.search((r"\bdef\s+(" + re.escape(old) + r")\b").encode(), blines[self.f][l - 1])
            if m:
                edit(self.f, l, m.start(1), m.end(1), new, old, "def")
                return
        problems.append(f"{self.f}:{o.line} def {old} not located")

    def visit_name_expr(self, o):
        n = self.vars.get(id(o.node)) if o.node is not None else None
        if n:
            b = blines[self.f][o.line - 1]
            if b[o.column : o.column + len(o.name)].decode(errors="replace") == o.name:
                edit(self.f, o.line, o.column, o.column + len(o.name), n, o.name, "param use")
            else:
                problems.append(f"{self.f}:{o.line} use of {o.name}")
        self.children(o)

    def visit_assignment_stmt(self, o):
        if self.cls and self.cls[-1] is not None:
            for lv in o.lvalues:
                for x in lv.items if isinstance(lv, nodes.TupleExpr) else [lv]:
                    if isinstance(x, nodes.NameExpr) and isinstance(x.node, nodes.Var) and x.node.info is self.cls[-1]:
                        n = member_new(self.cls[-1], x.name)
                        if n:
                            edit(self.f, x.line, x.column, x.column + len(x.name), n, x.name, "field")
        self.children(o)


FAILED = []
KW = collections.defaultdict(list)
for f, t in trees.items():
    for n in ast.walk(t):
        if isinstance(n, ast.Call):
            for k in n.keywords:
                if k.arg:
                    KW[(f, n.lineno, n.col_offset, n.end_lineno, n.end_col_offset)].append((k.lineno, k.col_offset, k.arg))
bypath = {}
for name, mf in res.files.items():
    p = os.path.relpath(mf.path, ROOT) if os.path.isabs(mf.path) else mf.path
    bypath[p] = mf
missing = [f for f in files if f not in bypath]
print("not seen by mypy", missing[:10])
sys.setrecursionlimit(10000)
for f in files:
    if f in bypath:
        try:
            V(f).visit_mypy_file(bypath[f])
        except Exception as e:
            import traceback

            traceback.print_exc(limit=4)
            problems.append(f"{f}: {e!r}")
            FAILED.append(f)
print("edits", sum(map(len, edits.values())), "problems", len(problems))
print(*problems, sep="\n")
used = set()
for f in edits:
    for k, (new, old) in edits[f].items():
        used.add((old, new))
for kind, M in (("name", NAMES), ("member", MEMBERS), ("param", PARAMS)):
    un = [k for k, v in M.items() if (k.split(".")[-1], v) not in used]
    print(kind, len(M), "never used", len(un), un[:12])
if "--write" in sys.argv:
    for f, es in edits.items():
        bl = blines[f]
        for (l, c0, c1), (new, old) in sorted(es.items(), reverse=True):
            assert bl[l - 1][c0:c1].decode() == old, (f, l, bl[l - 1], old)
            bl[l - 1] = bl[l - 1][:c0] + new.encode() + bl[l - 1][c1:]
        open(f, "wb").write(b"\n".join(bl))
