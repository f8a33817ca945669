package readme

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// root is the repository's folder.
const root = "../.."

// substitutions change commands that cannot run everywhere as written; an empty replacement skips
// the command. All other commands run unchanged.
var substitutions = []struct{ text, by, why string }{
	{"go run ./cmd/spillway train", "go run ./cmd/spillway train --steps 20", "512 steps take half a minute; a whole demo runs before a release"},
	{"go run ./examples/answers", "go run ./examples/answers -stories 500 -pairs 100 -steps 5", "1,500 steps take minutes; the example has a test of its own"},
	{"--steps 1000 ", "--steps 4 ", "1,000 steps of 124 million parameters take hours on a CPU"},
	{"--warmup 100 ", "--warmup 1 ", "as above"},
	{"--model gpt2 ", "--model tiny ", "124 million parameters take seconds to minutes a step on a CPU; tiny has GPT-2's vocabulary"},
	{"--device-memory 3GiB ", "", "the cap is for GPT-2's size"},
	{"spillway plan  --gpu detect --model gpt2-xl", "spillway plan  --gpu rtx-4090 --model gpt2-xl", "it needs a GPU"},
	{"spillway train --device cuda --ranks 4 --zero 3 --model gpt2-xl --data tokens.bin --trace trace.json", "spillway train --ranks 4 --zero 3 --model tiny --data tokens.bin --trace trace.json --steps 2", "it needs a GPU"},
	{"bench zero --device cuda ", "bench zero ", "it needs a GPU"},
	{"bench zero ", "bench zero --rounds 1 ", "all rounds take minutes; what they do is the same"},
	{"--rounds 2 --html scale.html ", "--rounds 1 --html scale.html ", "as above"},
	{"mpirun -np 16 --hostfile hosts --map-by slot:PE=4 --mca odls_base_sigkill_timeout 240 ", "", "it needs four hosts; tests run mpirun on one"},
	{"mpirun.mpich -np 16 -f hosts -bind-to core:4 ", "", "as above"},
	{"mpirun -np 16 --hostfile hosts --map-by ppr:8:node ", "", "it needs two hosts of eight GPUs"},
	{"NCCL_COMM_ID=node-0:29500 srun --ntasks-per-node 8 --gpus-per-task 1 ", "", "as above"},
	{"train --device cuda --model gpt2-xl --data tokens.bin --checkpoint", "train --model gpt2-xl --data tokens.bin --checkpoint", "it needs a GPU"},
	{"--model gpt2-xl --data tokens.bin --checkpoint runs/gpt2-xl ", "--model tiny --data tokens.bin --steps 2 --checkpoint runs/gpt2-xl ", "1.5 billion parameters take hours on a CPU"},
	{"/nvme/scratch:200GiB", "scratch:1GiB", "the folder is an example"},
	{"go run ./examples/larger-than-device", "", "it takes minutes; the example has a test of its own"},
	{"go test ./...", "", "a step of continuous integration by itself"},
	{"make release", "", "a step of continuous integration by itself"},
	{"go vet ./...", "", "a step of continuous integration by itself"},
	{"gofmt -l .", "", "a step of continuous integration by itself, on what is committed"},
	{".ci/run", "", "what runs this test"},
	{"./run.sh -budget 7m -only contact,compile,tests,bits,losses,wall", "", "it needs a GPU, in the folder of make gpu"},
	{"./run.sh -budget 15m -only speed-124m,speed-1.5b,kernels -out speed", "", "as above"},
	{"./run.sh -budget 10m -only peers,sanitizers,profilers -out tools", "", "as above"},
}

// command is a command of a page, with the output that the page shows.
type command struct {
	file   string
	line   int
	text   string
	output []string // lines of a console block
}

var starts = regexp.MustCompile(`^(spillway|mpirun|go|gofmt|make|\./|\.ci/)`)

// commandsOf returns the commands of a page: lines of its sh blocks, lines after the prompt in its
// console blocks, and indented lines that begin with one of the project's commands.
func commandsOf(t *testing.T, file string) (list []command) {
	text, err := os.ReadFile(filepath.Join(root, file))
	require.NoError(t, err)
	block, joined := "", ""
	for i, line := range strings.Split(string(text), "\n") {
		if fence, ok := strings.CutPrefix(strings.TrimSpace(line), "```"); ok {
			if block == "" {
				block = fence + " "
			} else {
				block = ""
			}
			continue
		}
		add := func(s string) {
			if rest, more := strings.CutSuffix(s, `\`); more {
				joined += strings.TrimSpace(rest) + " "
				return
			}
			s = strings.TrimSpace(joined + strings.TrimSpace(s))
			joined = ""
			if at := strings.Index(s, "  # "); at >= 0 {
				s = strings.TrimSpace(s[:at])
			}
			if s != "" && !strings.HasPrefix(s, "#") {
				list = append(list, command{file: file, line: i + 1, text: s})
			}
		}
		switch indented, isIndented := strings.CutPrefix(line, "    "); {
		case block == "sh ":
			add(line)
		case block == "console ":
			if s, ok := strings.CutPrefix(line, "$ "); ok {
				add(s)
			} else if last := len(list) - 1; last >= 0 {
				list[last].output = append(list[last].output, line)
			}
		case block == " ":
			require.False(t, starts.MatchString(strings.TrimSpace(line)), "%s:%d: a command in a block without a language is not run: call the block sh", file, i+1)
		case block == "" && isIndented && starts.MatchString(indented):
			add(indented)
		}
	}
	return list
}

// pages returns the README and the pages that can be reached from it.
func pages(t *testing.T) []string {
	list := []string{"README.md", "docs/start.md", "CONTRIBUTING.md", "ARCHITECTURE.md"} // start.md trains what others use
	for _, pattern := range []string{"docs/*.md", "docs/*/*.md", "examples/*/README.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		for _, f := range found {
			rel, err := filepath.Rel(root, f)
			require.NoError(t, err)
			if !slices.Contains(list, rel) {
				list = append(list, rel)
			}
		}
	}
	return list
}

// ofSize are substitutions that make a run smaller. They do not apply to plans.
var ofSize = []string{"--model gpt2 ", "--device-memory 3GiB "}

// substituted returns the command to run, or "" to skip it.
func substituted(text string, used map[string]bool) string {
	for _, s := range substitutions {
		switch {
		case !strings.Contains(text+" ", s.text), strings.HasPrefix(text, "spillway plan ") && slices.Contains(ofSize, s.text):
			continue
		case s.by == "" && text == s.text:
			text = ""
		default:
			text = strings.TrimSpace(strings.ReplaceAll(text+" ", s.text, s.by))
		}
		used[s.text] = true
	}
	return text
}

// TestCommands requires that every command can run and that every substitution is still needed.
// With SPILLWAY_README=1 it runs the commands of README.md and docs/start.md, and with
// SPILLWAY_LONG=1 those of every page. They run in the order of the pages in one folder, which is
// empty at first.
func TestCommands(t *testing.T) {
	used := map[string]bool{}
	var list []command
	for _, page := range pages(t) {
		list = append(list, commandsOf(t, page)...)
	}
	require.Greater(t, len(list), 15, "no commands found: did the pages' form change?")
	for _, c := range list {
		require.NotContains(t, c.text, "…", "%s:%d: a command with a gap can't be run: %s", c.file, c.line, c.text)
		substituted(c.text, used)
	}
	for _, s := range substitutions {
		require.True(t, used[s.text], "no command has %q any more: drop its substitution", s.text)
		require.NotEmpty(t, s.why)
	}
	if os.Getenv("SPILLWAY_README") == "" {
		t.Skip("SPILLWAY_README=1 runs the commands")
	}
	r := newRunner(t)
	for _, c := range list {
		if !long.On() && c.file != "README.md" && c.file != "docs/start.md" {
			continue
		}
		if text := substituted(c.text, used); text != "" {
			r.run(t, c, text)
		}
	}
}

// runner runs commands in a folder that contains what the pages assume.
type runner struct {
	work, repo string
	env        []string
}

func newRunner(t *testing.T) *runner {
	repo, err := filepath.Abs(root)
	require.NoError(t, err)
	r := &runner{work: t.TempDir(), repo: repo}
	bin, world := filepath.Join(r.work, "bin"), filepath.Join(repo, "world") // of the tutorial
	require.NoDirExists(t, world)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(world)) })
	cache := func(name string) string {
		out, err := exec.Command("go", "env", name).Output()
		require.NoError(t, err)
		return name + "=" + strings.TrimSpace(string(out))
	}
	r.env = append(os.Environ(), "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"), "GOBIN="+bin, cache("GOCACHE"), cache("GOMODCACHE"),
		"XDG_CACHE_HOME="+filepath.Join(r.work, "cache"), "XDG_CONFIG_HOME="+filepath.Join(r.work, "config"))
	write := func(name string, text []byte) {
		path := filepath.Join(r.work, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, text, 0o644))
	}
	for _, page := range pages(t) {
		text, err := os.ReadFile(filepath.Join(root, page))
		require.NoError(t, err)
		write(filepath.Join("corpus", page), text)
		write("held-out.txt", text)
	}
	config, err := json.Marshal(map[string]any{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 50257, "n_positions": 128})
	require.NoError(t, err)
	write("tiny/config.json", config)
	tokenizer, err := token.HuggingFace(token.GPT2())
	require.NoError(t, err)
	write("tiny/tokenizer.json", tokenizer)
	return r
}

func (r *runner) run(t *testing.T, c command, text string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // ends a hang; no time is asserted
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", text)
	cmd.Env, cmd.Dir = r.env, r.work
	if strings.HasPrefix(text, "go ") || strings.HasPrefix(text, "make ") {
		cmd.Dir = r.repo
	}
	began := time.Now()
	out, err := cmd.CombinedOutput()
	t.Logf("%s:%d: %s (%.1f s)", c.file, c.line, text, time.Since(began).Seconds())
	require.NoError(t, err, "%s:%d: %s\n%s", c.file, c.line, text, out)
	for _, line := range c.output {
		if !strings.Contains(line, "…") {
			require.Contains(t, string(out), strings.TrimSpace(line), "%s:%d: %s does not print it", c.file, c.line, text)
		}
	}
}
