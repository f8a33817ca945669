package jinja

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// rendering is one line of output of testdata/reference.py.
type rendering struct {
	Template string
	Messages json.RawMessage
	Prompt   bool
	Text     *string
	Raises   string
	Answers  []string
}

// Every template gives the same bytes as Python's Jinja.
func TestAgreesWithPython(t *testing.T) {
	golden, err := os.ReadFile("testdata/golden.jsonl")
	require.NoError(t, err)
	agrees(t, golden, 12*6*2)
}

// The same for many random conversations, which Python renders during the test.
func TestAgreesWithPythonNow(t *testing.T) {
	long.Only(t)
	seed := fmt.Sprint(os.Getpid())
	t.Log("seed", seed)
	out, err := exec.Command("/usr/bin/python3", "testdata/reference.py", "render", seed, "500").Output()
	require.NoError(t, err)
	agrees(t, out, 12*500*2)
}

func agrees(t *testing.T, golden []byte, want int) {
	compiled := map[string]*Template{}
	lines, n := bufio.NewScanner(bytes.NewReader(golden)), 0
	lines.Buffer(nil, 1<<24)
	for ; lines.Scan(); n++ {
		var c rendering
		require.NoError(t, json.Unmarshal(lines.Bytes(), &c))
		tmpl := compiled[c.Template]
		if tmpl == nil {
			source, err := os.ReadFile("testdata/templates/" + c.Template + ".jinja")
			require.NoError(t, err)
			tmpl, err = Compile(string(source))
			require.NoError(t, err, c.Template)
			compiled[c.Template] = tmpl
		}
		messages, err := FromJSON(c.Messages)
		require.NoError(t, err)
		got, spans, err := tmpl.Render(map[string]any{"messages": messages, "add_generation_prompt": c.Prompt, "tools": nil, "bos_token": "<s>", "eos_token": "</s>"})
		if c.Text == nil {
			require.ErrorContains(t, err, fmt.Sprintf("%q", c.Raises), "%s %s", c.Template, c.Messages)
			continue
		}
		require.NoError(t, err, "%s %s", c.Template, c.Messages)
		require.Equal(t, *c.Text, got, "%s %s", c.Template, c.Messages)
		require.Len(t, spans, len(c.Answers))
		for i, s := range spans {
			require.Equal(t, c.Answers[i], got[s.From:s.To])
		}
	}
	require.NoError(t, lines.Err())
	require.Equal(t, want, n)
}

// A missing function is an error that names it. A template may check whether strftime_now is
// defined.
func TestMissingFunctions(t *testing.T) {
	for source, want := range map[string]string{
		"a\n{{ strftime_now('%d') }}":                                         "the template: it calls strftime_now (at line 2), which is left out so that a text does not depend on the day; give a template with a date in its place",
		"{% set d = 'é' + strftime_now(x) %}":                                 "it calls strftime_now (at line 1)",
		"{{ [1, today()] }}":                                                  "it calls today (at line 1), which is no function here; give a template without it",
		"{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}": "",
	} {
		compiled, err := Compile(source)
		require.NoError(t, err)
		if _, _, err = compiled.Render(nil); want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, want)
		}
	}
}
