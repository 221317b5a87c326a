"""How the page looks, light and dark, on a telephone and on a wide screen."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2126; --faint: #59626b; --paper: #ffffff; --panel: #f4f6f8; --line: #d5dbe0;
  --good: #23845a; --look: #c2333f; --marked: #fbe7e9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e8ec; --faint: #9ba5ae; --paper: #14181c; --panel: #1e242a; --line: #37404a;
    --good: #4fbf8b; --look: #f0717b; --marked: #43242a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); }
body { font: 15px/1.45 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1560px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0.2rem 0; }
h2 { font-size: 1.1rem; margin: 1.6rem 0 0.5rem; }
h3 { font-size: 0.8rem; margin: 0; color: var(--faint); text-transform: uppercase; letter-spacing: 0.04em; }
p { margin: 0.3rem 0; overflow-wrap: anywhere; }
code { font: 0.9em ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.note { color: var(--faint); max-width: 75ch; font-size: 0.9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); gap: 0.7rem; }
.tiles { margin: 1rem 0; }
.tile { background: var(--panel); border-left: 5px solid var(--line); border-radius: 4px; padding: 0.6rem 0.8rem; }
.tile p { font-size: 0.9rem; }
.tile .answer { font-size: 1.2rem; font-weight: 600; }
.good { border-left-color: var(--good); }
.look { border-left-color: var(--look); }
.look .answer, .word { color: var(--look); }
.word { float: right; font-weight: 700; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0.7rem; }
figure { margin: 0; background: var(--panel); border-radius: 4px; padding: 0.5rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: 0.9rem; color: var(--faint); padding: 0.2rem 0.3rem; }
.scroll { overflow-x: auto; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 46rem), 1fr)); gap: 0 2rem; }
.tables > section { min-width: 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
table { width: max-content; max-width: 46rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.9rem 0.25rem 0; }
th, td { border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; }
td { overflow-wrap: break-word; }
.marked td { background: var(--marked); color: var(--look); font-weight: 600; }
"""
