// Package clitest holds helpers for the command's tests.
package clitest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
)

// Top is the module's folder, relative to the test's.
var Top = top()

func top() string {
	for dir := ".."; ; dir = filepath.Join(dir, "..") {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
}

// Testdata is the path of the module's reference models and texts.
var Testdata = filepath.Join(Top, "testdata")

// TinyRun trains the reference checkpoint for two steps.
var TinyRun = []string{"train", "--model", Testdata + "/gpt2", "--data", Testdata + "/text.bin", "--steps", "2", "--batch", "1", "--seq", "16"}

// ProgressLine matches the progress line that a plan or search prints every 1.5 s, on a busy
// machine more often.
var ProgressLine = regexp.MustCompile(`(?m)^.* … \d+\.\d s\n`)

// Command runs a command line in this process; a panic fails the test. It removes progress lines,
// which depend on the machine's speed.
func Command(args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = root.Run(context.Background(), args, &out, &errs)
	return status, out.String(), ProgressLine.ReplaceAllString(errs.String(), "")
}

// TinyWith returns TinyRun with more arguments.
func TinyWith(args ...string) []string { return append(append([]string(nil), TinyRun...), args...) }

// Edited copies a model folder with one change of its config.json.
func Edited(t *testing.T, from string, change func(map[string]any)) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(Testdata, from, "config.json"))
	require.NoError(t, err)
	var c map[string]any
	require.NoError(t, json.Unmarshal(text, &c))
	change(c)
	text, err = json.Marshal(c)
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644))
	return dir
}

// WriteFile writes a file into a folder of the test.
func WriteFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// Tree returns every file and folder below dir, with the contents of files.
func Tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			all[path] = "folder"
			return err
		}
		text, err := os.ReadFile(path)
		all[path] = string(text)
		return err
	}))
	return all
}

// Saved returns a folder with the tiny run's checkpoints of steps 1 and 2.
func Saved(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ck")
	status, _, stderr := Command(TinyWith("--checkpoint", dir, "--save-every", "1")...)
	require.Zero(t, status, stderr)
	return dir
}

// ShaLine matches the line with the hash of a completed run's parameters.
var ShaLine = regexp.MustCompile(`parameters' SHA-256: ([0-9a-f]{64})`)

// ShaOf returns the hash in ShaLine.
func ShaOf(t *testing.T, text string) string {
	t.Helper()
	m := ShaLine.FindStringSubmatch(text)
	require.NotNil(t, m, text)
	return m[1]
}

// ReadLines parses the complete lines of a metrics file.
func ReadLines(t *testing.T, path string) (lines []map[string]any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	require.NoError(t, err)
	for _, line := range strings.SplitAfter(string(text), "\n") {
		if strings.HasSuffix(line, "\n") {
			var v map[string]any
			require.NoError(t, json.Unmarshal([]byte(line), &v), line)
			lines = append(lines, v)
		}
	}
	return lines
}

// RequirePage checks that a page is one file of at most most bytes that loads nothing.
func RequirePage(t *testing.T, path string, most int) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.LessOrEqual(t, len(text), most)
	require.NotRegexp(t, `(?i)src=|@import|url\(|<link|https?://[^w]`, string(text))
	require.Contains(t, string(text), "prefers-color-scheme: dark")
	inBrowser(t, string(text))
}

// browserCheck shows a page in frames of several widths. It reports frames that scroll sideways,
// overlapping labels of charts, and buttons that do not copy their command.
const browserCheck = `<script>
onload = () => setTimeout(async () => {
  const found = [];
  for (const f of document.querySelectorAll("iframe")) {
    const d = f.contentDocument, w = f.clientWidth;
    if (!d.querySelector("svg.bars text")) found.push(w + ": no chart");
    let copied = "";
    Object.defineProperty(f.contentWindow.navigator, "clipboard", {value: {writeText: async s => { copied = s; }}});
    for (const b of d.querySelectorAll(".cmd button")) {
      b.click();
      await new Promise(done => setTimeout(done, 1));
      if (b.textContent != "Copied" || copied != b.parentNode.querySelector("code").textContent) found.push(w + ": the button copies " + copied);
    }
    if (d.documentElement.scrollWidth > w) found.push(w + ": scrolls to " + d.documentElement.scrollWidth);
    for (const e of d.querySelectorAll(".wide")) if (e.scrollWidth > e.clientWidth + 1) found.push(w + ": a table of " + e.scrollWidth + " in " + e.clientWidth);
    for (const svg of d.querySelectorAll("svg.bars")) {
      const all = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
      all.forEach(([s, a], i) => all.slice(i + 1).forEach(([t, b]) => {
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2) found.push(w + ": " + s + " covers " + t);
      }));
    }
  }
  document.body.innerHTML = "<pre>FOUND[" + found.join("; ") + "]</pre>";
}, 500);
</script>`

// inBrowser checks a page at the widths of telephones and screens, if Chromium is installed.
func inBrowser(t *testing.T, page string) {
	t.Helper()
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		t.Log("no Chromium: the page was not rendered")
		return
	}
	outer := "<!doctype html><body>" + browserCheck
	for _, width := range []int{360, 768, 1280} {
		outer += fmt.Sprintf(`<iframe style="border:0;width:%dpx;height:900px" srcdoc="%s"></iframe>`, width, html.EscapeString(page))
	}
	out, err := exec.Command(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir="+t.TempDir(), "--virtual-time-budget=5000", "--dump-dom", "file://"+WriteFile(t, "outer.html", outer)).Output()
	require.NoError(t, err)
	require.Contains(t, string(out), "FOUND[]")
}

// Planned returns the status and the document of a plan. Its search for alternatives is short
// unless the arguments set --effort.
func Planned(t *testing.T, args ...string) (int, planning.Doc) {
	t.Helper()
	status, stdout, stderr := Command(append([]string{"plan", "--json", "-", "--effort", "40"}, args...)...)
	var doc planning.Doc
	dec := json.NewDecoder(strings.NewReader(stdout))
	dec.DisallowUnknownFields()
	require.NoError(t, dec.Decode(&doc), "%v: %s", args, stderr)
	require.False(t, dec.More(), "stdout holds the JSON and nothing else")
	return status, doc
}

// Unwrapped returns a text without its line breaks.
func Unwrapped(text string) string { return strings.Join(strings.Fields(text), " ") }

// RankFile is the file name of a checkpoint of one rank.
const RankFile = "rank-00000-of-00001.safetensors"
