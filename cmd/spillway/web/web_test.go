//go:build !js

package main

import (
	"bytes"
	"cmp"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/here"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/internal/testkit/browser"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/planner"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }

// A line is split into words as by a shell; the output of Shell is read back.
func TestCommandLines(t *testing.T) {
	for line, want := range map[string][]string{
		"":                                   {"plan"},
		"$ spillway plan --model gpt2":       {"plan", "--model", "gpt2"},
		"  --model=gpt2\t--zero 3 ":          {"plan", "--model=gpt2", "--zero", "3"},
		"plan --fit \\\n  --ranks 2":         {"plan", "--fit", "--ranks", "2"},
		`plan '--model' "a \"b\" \c" d\ e`:   {"plan", "--model", `a "b" \c`, "d e"},
		"train --model ''":                   {"plan", "--model", ""},
		`spillway train \  --zero 3 \--lr 1`: {"plan", "--zero", "3", "--lr", "1"},
	} {
		got, err := command(line)
		require.NoError(t, err, line)
		require.Equal(t, want, got, line)
	}
	for _, line := range []string{"plan 'a", `plan "a`, `plan a\`} {
		_, err := command(line)
		require.ErrorContains(t, err, "is left open", line)
	}
	words := []string{"plan", "--recompute", "drop:h.{0-3}.ln", "--x", "it's", "--y", `"\`, "--z", "", "a b\nc"}
	got, err := command(planner.Shell(words))
	require.NoError(t, err)
	require.Equal(t, words, got)
}

func TestFormShowsItsFlags(t *testing.T) {
	words := []string{"--fit", "--model=gpt2", "--ranks", "2", "--node-memory", "1GB", "--ranks", "3", "--gpu"}
	values, rest := fill(words, []string{"model", "ranks", "gpu", "seq"})
	require.Equal(t, map[string]string{"model": "gpt2", "ranks": "3", "gpu": ""}, values)
	require.Equal(t, []string{"--fit", "--node-memory", "1GB"}, rest)
}

func TestThePageIsComplete(t *testing.T) {
	index, err := indexPage([]byte("planner"))
	require.NoError(t, err)
	for _, want := range []string{"<option>gpt2</option>", "<option>rtx-4090</option>", "<option>adamw</option>",
		"prefers-color-scheme: dark"} {
		require.Contains(t, string(index), want)
	}
	require.NotRegexp(t, `(?i)https?://|src=|@import|<link [^>]*href="[^d]`, string(index), "it loads its own files only")
}

// native returns the command's output without progress.
func native(t *testing.T, args string) (status int, stdout, stderr string) {
	words, err := command(args)
	require.NoError(t, err)
	var out, errs bytes.Buffer
	root := cli.Root("", planning.Command(here.Machine{}, nil), cli.VersionCommand())
	status = cli.Execute(t.Context(), root, words, &out, &errs)
	progress := regexp.MustCompile(`(?m)^.* … [0-9.]+ s\n`)
	return status, out.String(), strings.TrimSpace(progress.ReplaceAllString(errs.String(), ""))
}

// site serves a built folder without types or encodings, and records the requests.
type site struct {
	*httptest.Server
	mu    sync.Mutex
	asked map[string]bool
}

func serve(t *testing.T) *site {
	dir := t.TempDir()
	require.NoError(t, build(dir))
	s := &site{asked: map[string]bool{}}
	files := http.FileServer(http.Dir(dir))
	s.Server = httptest.NewServer(http.StripPrefix("/some/folder", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.asked[r.URL.Path] = true
		s.mu.Unlock()
		files.ServeHTTP(w, r)
	})))
	t.Cleanup(s.Close)
	return s
}

// ask opens the address of a request and waits for its answer.
func (s *site) ask(p *browser.Page, line string) (status int, stdout, stderr string) {
	p.Go("about:blank")
	p.Go(s.URL + "/some/folder/#" + url.PathEscape(line))
	return answered(p)
}

func answered(p *browser.Page) (status int, stdout, stderr string) {
	p.Until("document.body?.dataset.answered")
	status, _ = strconv.Atoi(p.Text("document.body.dataset.answered"))
	return status, p.Text("document.querySelector('#text').textContent"), p.Text("document.querySelector('#error').textContent")
}

func TestBrowser(t *testing.T) {
	if os.Getenv("SPILLWAY_LONG") == "" {
		t.Skip("it compiles the planner for browsers: SPILLWAY_LONG=1")
	}
	s := serve(t)
	t.Run("answers", s.answers)
	t.Run("form", s.form)
	t.Run("json", s.json)
}

// The page gives the command's answer for an address, at every width and in both colour schemes.
func (s *site) answers(t *testing.T) {
	p := browser.Open(t)
	for _, line := range []string{
		"plan --model gpt2-xl --gpu rtx-4090 --ranks 4 --precision bf16 --effort 10",
		"plan --model llama-3-70b --gpu rtx-4090 --fit --effort 4", // does not fit
		"plan --model gpt2 --gpx rtx-4090",
		"plan --model gpt2 --gpu rtx-9",
		"plan --list-gpus",
	} {
		status, stdout, stderr := s.ask(p, line)
		wantStatus, wantOut, wantErr := native(t, line)
		require.Equal(t, []any{wantStatus, wantOut, wantErr}, []any{status, stdout, stderr}, line)
		require.Equal(t, stderr == "", p.Text("document.querySelector('#error').hidden") == "true")
		hasPage := stdout != "" && !strings.Contains(line, "--list")
		require.Equal(t, hasPage, p.Text("document.querySelector('iframe').hidden") == "false", line)
		looks(t, p, line)
	}
	for line, want := range map[string]string{
		"plan --model gpt2":                              "give --gpu NAME",
		"plan --model gpt2 --gpu detect":                 "give --gpu NAME",
		"plan --model gpt2 --gpu rtx-4090 --html a.html": "a browser has no files",
		"plan --model 'gpt2":                             "left open",
	} {
		status, _, stderr := s.ask(p, line)
		require.Equal(t, cli.ExitBadInput, status, line)
		require.Contains(t, stderr, want, line)
	}
	// A command pasted after # has characters that addresses encode.
	for pasted, line := range map[string]string{
		"plan --model gpt2 --gpu v100-16 --offload optimizer=host:40%,activations=host --effort 4":         "",
		`$ spillway train \   --model gpt2 \   --threads 2 --effort 4 --offload optimizer=host:25%25+disk`: "plan --model gpt2 --threads 2 --effort 4 --offload optimizer=host:25%+disk",
	} {
		p.Go("about:blank")
		p.Go(s.URL + "/some/folder/#" + pasted)
		status, stdout, stderr := answered(p)
		wantStatus, wantOut, wantErr := native(t, cmp.Or(line, pasted))
		require.Equal(t, []any{wantStatus, wantOut, wantErr}, []any{status, stdout, stderr}, pasted)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	own := map[string]bool{"/": true, "/planner.wasm.gz": true, "/worker.js": true, "/wasm_exec.js": true}
	require.Equal(t, own, s.asked)
}

// looks checks the shown answer at the widths of telephones and screens.
func looks(t *testing.T, p *browser.Page, line string) {
	const still = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
	colours := map[string]string{}
	for _, width := range []int{360, 768, 1280} {
		for _, scheme := range []string{"light", "dark"} {
			p.Show(width, scheme)
			p.Text(still)
			inside := p.Text("document.documentElement.scrollWidth <= innerWidth")
			require.Equal(t, "true", inside, "%s at %d scrolls sideways", line, width)
			require.Equal(t, "true", p.Text(`(() => {
				const f = document.querySelector("iframe"), d = f.contentDocument.documentElement;
				return f.hidden || d.scrollWidth <= f.clientWidth && d.offsetHeight <= f.clientHeight;
			})()`), "%s at %d: the plan is cut", line, width)
			colours[scheme] = p.Text(`[document, document.querySelector("iframe").contentDocument].map(
				d => getComputedStyle(d.body).backgroundColor).join()`)
		}
	}
	require.NotEqual(t, colours["light"], colours["dark"])
}

// The form writes the address. A second request cancels the first.
func (s *site) form(t *testing.T) {
	p := browser.Open(t)
	p.Go(s.URL + "/some/folder/#" + url.PathEscape("plan --model llama-3-70b --gpu h100-80 --ranks 64 --effort 1000"))
	p.Until("typeof worker == 'object' && worker")
	p.Text(`(() => {
		const f = document.forms[0];
		for (const e of f.elements) if (e.name) e.value = "";
		f.model.value = "gpt2"; f.gpu.value = "rtx-4090"; f.disk.value = "/a b:2TB"; f.rest.value = "--effort 5 --zero 1";
		f.requestSubmit();
	})()`)
	p.Until("location.hash.includes('gpt2')")
	_, stdout, _ := answered(p)
	_, want, _ := native(t, "--model gpt2 --gpu rtx-4090 --disk '/a b:2TB' --effort 5 --zero 1")
	require.Equal(t, want, stdout)
	require.Equal(t, "gpt2|rtx-4090|/a b:2TB|--effort 5 --zero 1",
		p.Text("(f => [f.model, f.gpu, f.disk, f.rest].map(e => e.value).join('|'))(document.forms[0])"))
	p.Text("history.back()")
	p.Until("document.forms[0].model.value == 'llama-3-70b'")
}

// A plan's JSON has the same bytes in a browser as from the command.
func (s *site) json(t *testing.T) {
	p := browser.Open(t)
	for _, question := range []string{
		"--model gpt2 --gpu rtx-4090 --ranks 4 --fit --effort 30",
		"--model gpt2-xl --gpu v100-32 --nodes 2 --gpus-per-node 8 --precision fp16 --tokens 1e11 --price 2.5 --effort 10",
		"--model llama-3-8b --gpu rtx-4090 --disk /nvme:2TB --effort 6",
		"--model llama-3-8b --gpu h100-80 --ranks 8 --precision bf16 --seq 8192 --batch 1 --fit --effort 10",
		"--model gpt2-xl --gpu mi300x-192 --ask gpus --effort 40",
		"--model gpt2-medium --gpu a100-40 --ranks 16 --global-batch 512 --fit --effort 20",
		"--model gpt2 --ranks 4 --threads 8 --transport shm --device-memory 1GiB --effort 10",
		"--model qwen-3-0.6b --gpu t4-16 --ranks 4 --tensor 2 --accum 4 --recompute selective --effort 10",
	} {
		line := "plan " + question + " --json -"
		status, got, stderr := s.ask(p, line)
		wantStatus, want, wantErr := native(t, line)
		require.Equal(t, wantStatus, status, line+stderr)
		require.Equal(t, want, got, line)
		require.Equal(t, wantErr, stderr, line)
		require.Contains(t, got, `"version"`, line)
	}
}
