package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
)

// Every bad input ends in one clear line that names it, with the documented status.
func TestBadInput(t *testing.T) {
	noText := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(noText, "a.bin"), []byte{0, 1, 0}, 0o644))
	emptyFolder := t.TempDir()
	inTheWay := writeFile(t, "file", "x")
	twoTokens := writeFile(t, "two.bin", "\x01\x00\x02\x00")
	halfToken := writeFile(t, "half.bin", "\x01\x00\x02")
	over := make([]byte, 400)
	binary.LittleEndian.PutUint16(over[300:], 256)
	beyond := writeFile(t, "beyond.bin", string(over))
	without := func(model, key string) string {
		return edited(t, model, func(c map[string]any) { delete(c, key) })
	}
	with := func(model, key string, v any) string {
		return edited(t, model, func(c map[string]any) { c[key] = v })
	}
	cases := []struct {
		name   string
		args   []string
		status int
		names  string // text that the line must contain
	}{
		{"unknown command", []string{"trian"}, 1, "trian"},
		{"argument without a flag", []string{"train", "extra"}, 1, "extra"},
		{"unknown flag", []string{"train", "--nope"}, 1, "nope"},
		{"flag without a value", []string{"train", "--steps"}, 1, "--steps"},
		{"not a number", tinyWith("--lr", "abc"), 1, `--lr "abc": a number is needed`},
		{"not a whole number", tinyWith("--batch", "1.5"), 1, `--batch "1.5": a whole number is needed`},
		{"not a duration", tinyWith("--timeout", "60"), 1, `--timeout "60": a duration is needed`},
		{"not a size", tinyWith("--device-memory", "1XB"), 1, `--device-memory: "1XB" is not a size`},
		{"no model", []string{"train", "--data", twoTokens}, 1, "--model"},
		{"no data", []string{"train", "--model", "gpt2"}, 1, "--data"},
		{"unknown preset", tinyWith("--model", "gpt9"), 1, "gpt9"},
		{"no model folder", tinyWith("--model", "./no/such"), 1, "./no/such"},
		{"no data file", tinyWith("--data", "no-such-file"), 1, "no-such-file"},
		{"folder with no text", tinyWith("--data", noText), 1, "has no text"},
		{"empty folder", tinyWith("--data", emptyFolder), 1, emptyFolder},
		{"two tokens", tinyWith("--data", twoTokens), 1, "two.bin has 2 tokens"},
		{"half a token", tinyWith("--data", halfToken), 1, "half.bin"},
		{"token beyond the vocabulary", tinyWith("--data", beyond), 1, "beyond the vocabulary of 256"},
		{"no held-out data", tinyWith("--eval-data", "no-such-file"), 1, "--eval-data"},
		{"unknown tokenizer", tinyWith("--tokenizer", "words"), 1, "words"},
		{"zero ranks", tinyWith("--ranks", "0"), 1, "--ranks 0"},
		{"negative ranks", tinyWith("--ranks=-2"), 1, "--ranks -2"},
		{"ranks beyond a process", tinyWith("--ranks", "5000"), 1, "--ranks 5000"},
		{"ranks beyond reason", tinyWith("--ranks", "1000000000"), 1, "--ranks 1000000000"},
		{"threads beyond reason", tinyWith("--threads", "1000000000"), 1, "--threads 1000000000"},
		{"rows beyond reason", tinyWith("--batch", "9223372036854775807"), 1, "--batch 9223372036854775807"},
		{"zero steps", tinyWith("--steps", "0"), 1, "--steps 0"},
		{"zero rows", tinyWith("--batch", "0"), 1, "--batch 0"},
		{"zero micro-batches", tinyWith("--accum", "0"), 1, "--accum 0"},
		{"row over the positions", tinyWith("--seq", "65"), 1, "--seq 65 is over the model's 64 positions"},
		{"stage 4", tinyWith("--zero", "4"), 1, "--zero 4"},
		{"negative stage", tinyWith("--zero=-1"), 1, "--zero -1"},
		{"rate not a number", tinyWith("--lr", "NaN"), 1, "--lr NaN"},
		{"negative clip", tinyWith("--clip=-1"), 1, "--clip -1"},
		{"beta of 1", tinyWith("--beta2", "1"), 1, "--beta2 1"},
		{"dropout of 1", tinyWith("--dropout", "1"), 1, "--dropout 1"},
		{"dropout of a Llama", tinyWith("--model", testdata+"/llama-tied", "--dropout", "0.1"), 1, "--dropout 0.1"},
		{"rounding of what is not bf16", tinyWith("--bf16-rounding", "portable"), 1, "--bf16-rounding portable with --precision fp32"},
		{"rounding on a GPU", tinyWith("--bf16-rounding", "portable", "--precision", "bf16", "--device", "cuda"), 1, "--bf16-rounding portable with --device cuda"},
		{"unknown optimizer", tinyWith("--optimizer", "adamx"), 1, `--optimizer "adamx"`},
		{"unknown schedule", tinyWith("--lr-schedule", "exp"), 1, `--lr-schedule "exp"`},
		{"unknown order", tinyWith("--order", "random"), 1, `--order "random"`},
		{"epilogues on the CPU", tinyWith("--precision", "bf16", "--epilogues", "dgelu"), 1, "--epilogues dgelu with --device cpu: only a GPU's products"},
		{"unknown epilogue", tinyWith("--epilogues", "relu"), 1, `--epilogues "relu": use default, none, all`},
		{"unknown device", tinyWith("--device", "tpu"), 1, `--device "tpu"`},
		{"pattern without a match", tinyWith("--freeze", "h.9.*"), 1, `"h.9.*"`},
		{"evaluation without data", tinyWith("--eval-every", "1"), 1, "--eval-data"},
		{"resume without a folder", tinyWith("--resume"), 1, "--checkpoint"},
		{"saves without a folder", tinyWith("--save-every", "1"), 1, "--checkpoint"},
		{"a folder without a config.json", tinyWith("--model", emptyFolder), 1, emptyFolder},
		{"checkpoint where a file is", tinyWith("--checkpoint", inTheWay), 1, inTheWay},
		{"disk where a file is", tinyWith("--disk", inTheWay), 1, inTheWay},
		{"trace into a folder", tinyWith("--trace", emptyFolder), 1, emptyFolder},
		{"metrics into a folder", tinyWith("--metrics", emptyFolder), 1, emptyFolder},
		{"metrics below a file", tinyWith("--metrics", inTheWay+"/m"), 1, inTheWay},
		{"no weights", tinyWith("--init", emptyFolder), 1, emptyFolder},
		{"weights of another model", tinyWith("--init", testdata+"/llama-tied"), 1, "llama-tied"},
		{"cap of 1 KiB", tinyWith("--device-memory", "1KiB"), 2, "the cap is 1.00 KiB"},
		{"host cap of 1 KiB", tinyWith("--host-memory", "1KiB"), 2, "outside its arena and the cap is 1.00 KiB"},
		{"more than the machine has", tinyWith("--model", "llama-3-405b"), 2, "on this machine"},
		{"no n_layer", tinyWith("--model", without("gpt2", "n_layer")), 1, "n_layer"},
		{"no vocab_size", tinyWith("--model", without("gpt2", "vocab_size")), 1, "vocab_size"},
		{"no model_type", tinyWith("--model", without("gpt2", "model_type")), 1, "model_type"},
		{"no n_positions", tinyWith("--model", without("gpt2", "n_positions")), 1, "n_positions"},
		{"no intermediate_size", tinyWith("--model", without("llama-tied", "intermediate_size")), 1, "intermediate_size"},
		{"no num_attention_heads", tinyWith("--model", without("llama-tied", "num_attention_heads")), 1, "num_attention_heads"},
		{"unknown family", tinyWith("--model", with("gpt2", "model_type", "bert")), 1, "bert"},
		{"negative layers", tinyWith("--model", with("gpt2", "n_layer", -1)), 1, "n_layer"},
		{"absurd layers", tinyWith("--model", with("gpt2", "n_layer", 1e15)), 1, "n_layer"},
		{"half a layer", tinyWith("--model", with("gpt2", "n_layer", 1.5)), 1, "n_layer"},
		{"layers as text", tinyWith("--model", with("gpt2", "n_layer", "two")), 1, "n_layer"},
		{"width that heads don't divide", tinyWith("--model", with("gpt2", "n_head", 5)), 1, "n_head"},
		{"heads that groups don't divide", tinyWith("--model", with("llama-tied", "num_key_value_heads", 3)), 1, "num_key_value_heads"},
		{"absurd width", tinyWith("--model", with("gpt2", "n_embd", 1e18)), 1, "n_embd"},
		{"zero vocabulary", tinyWith("--model", with("gpt2", "vocab_size", 0)), 1, "vocab_size"},
		{"unknown activation", tinyWith("--model", with("gpt2", "activation_function", "tan")), 1, "tan"},
		{"config without a file", tinyWith("--config", "no-such.yaml"), 1, "no-such.yaml"},
		{"config that is not YAML", tinyWith("--config", writeFile(t, "c.yaml", "a: [1, 2")), 1, "c.yaml"},
		{"config that is a list", tinyWith("--config", writeFile(t, "c.yaml", "- a\n")), 1, "c.yaml:1"},
		{"config with an unknown key", tinyWith("--config", writeFile(t, "c.yaml", "steps: 1\n\nstep: 2\n")), 1, `c.yaml:3: unknown key "step"`},
		{"config with a bad value", tinyWith("--config", writeFile(t, "c.yaml", "lr: 1\nprefetch: far\n")), 1, `c.yaml:2: --prefetch "far": a whole number is needed`},
		{"config with a mapping", tinyWith("--config", writeFile(t, "c.yaml", "lr:\n  a: 1\n")), 1, "c.yaml:1: lr"},
		{"config with a key twice", tinyWith("--config", writeFile(t, "c.yaml", "beta1: 0.1\nbeta1: 0.2\n")), 1, "c.yaml:2"},
		{"config with an empty value", tinyWith("--config", writeFile(t, "c.yaml", "dropout:\n")), 1, "c.yaml:1: dropout"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got := command(c.args...)
			require.Equal(t, c.status, got.status, got.stderr)
			line, rest, _ := strings.Cut(got.stderr, "\n")
			require.True(t, strings.HasPrefix(line, "spillway: "), line)
			require.Contains(t, line, c.names)
			require.NotContains(t, got.stderr, "goroutine ")
			if !strings.Contains(rest, "Did you mean") && !strings.HasSuffix(line, "it fits as:") {
				require.Empty(t, rest)
			}
			require.Empty(t, got.stdout)
			require.NotContains(t, line, "strconv.")
		})
	}
}

// contractFlags is the table of `spillway train`, with a value for each.
var contractFlags = map[string]string{
	"config": "c.yaml", "model": "gpt2", "init": "random", "data": "x.txt", "tokenizer": "bytes", "order": "sequential", "template": "t.jinja", "loss-on": "all", "long": "drop", "packing": "off", "eval-split": "5%", "epochs": "2",
	"steps": "1", "batch": "1", "seq": "8", "accum": "1", "optimizer": "adamw", "lr": "1e-3", "lr-schedule": "constant", "warmup": "0",
	"min-lr": "0", "weight-decay": "0.1", "beta1": "0.9", "beta2": "0.95", "eps": "1e-8", "clip": "0",
	"dropout": "0", "seed": "1", "freeze": "wte.weight", "lora": "r=8,alpha=16,targets=*.attn.*,*.mlp.*,dropout=0", "base": "int8", "threads": "1", "prefetch": "1", "overlap": "off",
	"eval-data": "y.txt", "eval-every": "1", "eval-steps": "1", "device": "cpu", "ranks": "1",
	"device-memory": "1GiB", "host-memory": "1GB", "disk": "d:1GiB", "zero": "3", "reproducible": "true",
	"precision": "fp32", "reduce": "same", "int8": "optimizer", "epilogues": "none", "recompute": "none", "offload": "optimizer=host", "require-pinned": "true", "cuda-graphs": "off",
	"fit": "true", "global-batch": "8", "checkpoint": "ck", "save-every": "1", "async-save": "auto", "keep": "1", "export": "hf", "resume": "true", "timeout": "60s",
	"bf16-rounding": "portable", "optimizer-dtype": "bf16", "stochastic-rounding": "true", "loss-scale-hysteresis": "1", "metrics": "m.jsonl", "trace": "t.json", "tensorboard": "tb", "metrics-addr": "9090", "collectives": "tree",
}

func newFlags() (*pflag.FlagSet, *spillway.Config, *options.Later) {
	fs, c, l := pflag.NewFlagSet("train", pflag.ContinueOnError), &spillway.Config{}, &options.Later{}
	options.Train(fs, c, l)
	return fs, c, l
}

func TestEveryFlagOfTheContractParses(t *testing.T) {
	for name, value := range contractFlags {
		fs, _, _ := newFlags()
		require.NoError(t, fs.Parse([]string{"--" + name + "=" + value}), name)
	}
}

// Each setting runs, or is rejected with status 1 and an error that names its flag.
func TestUnbuiltFlagsAreRefusedByName(t *testing.T) {
	for flag, values := range map[string][]string{
		"precision": {"bf16", "fp16"}, "int8": {"optimizer", "gather", "reduce", "activations", "matmul"}, "recompute": {"selective", "full", "auto"},
		"offload":        {"optimizer=host", "optimizer=disk", "parameters=host", "parameters=disk", "gradients=host", "gradients=disk", "activations=host", "activations=disk"},
		"require-pinned": {"true"}, "fit": {"true"}, "global-batch": {"4"}, "device": {"cuda"},
	} {
		for _, value := range values {
			got := command(tinyWith("--"+flag+"="+value, "--disk", t.TempDir())...)
			if got.status == 0 {
				continue
			}
			require.Equal(t, 1, got.status, "--%s %s: %s", flag, value, got.stderr)
			require.Contains(t, got.stderr, "--"+flag)
		}
	}
}

func TestNamesAreCaseInsensitiveAndTheLastFlagWins(t *testing.T) {
	want := command(tinyRun...)
	require.Equal(t, 0, want.status, want.stderr)
	got := command(tinyWith("--optimizer", "sgd", "--optimizer", "AdamW", "--lr-schedule", "CONSTANT", "--init", "Random", "--order", "Sequential",
		"--precision", "FP32", "--device", "CPU", "--tokenizer", "Bytes")...)
	require.Equal(t, 0, got.status, got.stderr)
	require.Equal(t, want.stdout, got.stdout)
}

// A key of the file is a flag; a flag of the command line overrides it.
func TestConfigFile(t *testing.T) {
	path := writeFile(t, "c.yaml", "# a run\nmodel: "+testdata+"/gpt2\ndata: "+testdata+"/text.bin\nsteps: 9\nbatch: 1\nseq: 16\nlr: 1e-3\nfreeze: [h.0.*, wpe.weight]\nreproducible: false\n")
	fs, c, _ := newFlags()
	require.NoError(t, fs.Parse([]string{"--steps", "2"}))
	require.NoError(t, cli.ApplyConfigFile(fs, path))
	require.Equal(t, 2, c.Steps)
	require.Equal(t, 1, c.Batch)
	require.Equal(t, []string{"h.0.*", "wpe.weight"}, c.Freeze)
	got := command("train", "--config", path, "--steps", "2", "--freeze", "")
	require.Equal(t, 0, got.status, got.stderr)
	require.Equal(t, command(tinyRun...).stdout, got.stdout)
}

// Reading any file never panics, and errors name the file. A value means the same in the file as on
// the command line.
func FuzzConfig(f *testing.F) {
	for _, s := range []string{"", "steps: 3\n", "lr: 1e-3\nfreeze: [a, b]\n", "- 1", "a: &x 1\nb: *x\n", "steps: !!int 3", "steps: |\n  3\n", "{steps: 1, lr: 2}",
		"? a\n: b", "steps: 1\n---\nlr: 2\n", "<<: {a: b}", "data: ~", "seed: -1", "model: \"\\x00\"", "steps: 'x", "\xff\xfe", "steps: 0x10", "eps: .inf", "lr: .nan", "reproducible: yes",
		"timeout: 5m", "device-memory: 40MiB", "*a : 1", "[]: 1", "\"steps\": 2"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		fs, c, _ := newFlags()
		err := cli.ApplyConfig(fs, "c.yaml", text)
		if err != nil {
			require.True(t, strings.HasPrefix(err.Error(), "--config c.yaml"), err.Error())
			require.NotContains(t, err.Error(), "\n")
			return
		}
		var args []string
		fs.Visit(func(fl *pflag.Flag) { args = append(args, "--"+fl.Name+"="+fl.Value.String()) })
		again, d, _ := newFlags()
		require.NoError(t, again.Parse(args), "%q", args)
		require.Equal(t, c.Steps, d.Steps)
		require.Equal(t, c.Freeze, d.Freeze)
		require.Equal(t, c.DeviceMemory, d.DeviceMemory)
		_ = c.Validate()
	})
}

var plainInteger = regexp.MustCompile(`^[0-9]{1,18}$`)

// Sizes are never negative, and a bare integer is bytes exactly.
func FuzzSizes(f *testing.F) {
	for _, s := range []string{"1", "1KiB", "1.5GB", "9007199254740993", "1e3", "-1", "+1", "1,000", "8EiB", "9999999EB", "1 MiB", "0.1B", "NaN", "infB", "/data:1GiB", "/a:b", ":", "C:\\x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := cli.ParseSize(s)
		if err == nil {
			require.GreaterOrEqual(t, n, int64(0))
		}
		if plainInteger.MatchString(s) {
			require.NoError(t, err)
			require.Equal(t, strings.TrimLeft(s, "0"), strings.TrimLeft(fmt.Sprint(n), "0"))
		}
		if err == nil {
			again, err := cli.ParseSize(cli.SizeText(n))
			require.NoError(t, err)
			require.Equal(t, n, again)
		}
		var dir string
		var size int64
		if options.Disk(&dir, &size).Set(s) == nil {
			require.NotEmpty(t, dir)
			require.True(t, strings.HasPrefix(s, dir))
			if size == 0 && dir != s { // an explicit size of zero is a size
				require.Regexp(t, `:0*(\.0*)?`, s[len(dir):])
			}
		}
	})
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "17": 17, "1KB": 1000, "1KiB": 1024, "2MB": 2e6, "2MiB": 2 << 20, "3GB": 3e9, "1.5GiB": 3 << 29, "1 TiB": 1 << 40,
		"9007199254740993": 9007199254740993} {
		got, err := cli.ParseSize(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for want, bytes := range map[string]int64{"0": 0, "1": 1, "1001": 1001, "1KiB": 1024, "64MiB": 64 << 20, "500GB": 500e9, "1TB": 1e12, "1536MiB": 3 << 29, "4EiB": 1 << 62} {
		require.Equal(t, want, cli.SizeText(bytes))
	}
	for _, text := range []string{"", "1K", "1e3", "1,000", "-1", "+1", "x", "1 2", "GiB", "99999999999999999999", "8EiB"} {
		_, err := cli.ParseSize(text)
		require.Error(t, err, text)
	}
}
