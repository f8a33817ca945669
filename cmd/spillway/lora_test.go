package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A run with adapters is evaluated, generates, and is exported in both forms. Each form loads as a
// model.
func TestLoRAFromTrainToModel(t *testing.T) {
	dir := t.TempDir()
	ck, merged, adapter := filepath.Join(dir, "ck"), filepath.Join(dir, "merged"), filepath.Join(dir, "adapter")
	base := testdata + "/gpt2"
	got := command(tinyWith("--init", base, "--steps", "6", "--lr", "1e-2", "--lora", "r=4,alpha=8,targets=*.attn.*,*.mlp.*", "--checkpoint", ck)...)
	require.Zero(t, got.status, got.stderr)
	got = command("ckpt", "export", ck, "--to", merged)
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "has adapters")
	for to, flags := range map[string][]string{merged: {"--merge"}, adapter: {"--format", "peft"}} {
		got = command(append([]string{"ckpt", "export", ck, "--to", to}, flags...)...)
		require.Zero(t, got.status, got.stderr)
	}
	loss := func(model string) (v struct{ Loss float64 }) {
		got := command("eval", "--model", model, "--data", testdata+"/text.bin", "--seq", "16", "--json", "-")
		require.Zero(t, got.status, "%s: %s", model, got.stderr)
		require.NoError(t, json.Unmarshal([]byte(got.stdout), &v))
		got = command("generate", "--model", model, "--prompt", "func", "--tokens", "3", "--temperature", "0")
		require.Zero(t, got.status, "%s: %s", model, got.stderr)
		return v
	}
	want := loss(ck).Loss
	require.InDelta(t, want, loss(merged).Loss, 1e-5)
	require.Equal(t, want, loss(adapter).Loss)
	require.Less(t, want, loss(base).Loss-0.01, "the adapters are trained")
	entries, err := os.ReadDir(adapter)
	require.NoError(t, err)
	require.Len(t, entries, 2)
}

func TestLoRAIsRefusedByName(t *testing.T) {
	const adapters = "r=2,alpha=4,targets=*.attn.*"
	for said, flags := range map[string][]string{
		"--lora with --freeze: the whole model is frozen":                        {"--lora", adapters, "--freeze", "wte.*"},
		"--lora with --device cuda":                                              {"--lora", adapters, "--device", "cuda"},
		"--base int8 needs --lora":                                               {"--base", "int8"},
		"--base int4: 4 bits are not built":                                      {"--lora", adapters, "--base", "int4"},
		"--base bf16 with --precision fp16":                                      {"--lora", adapters, "--base", "bf16", "--precision", "fp16"},
		"--lora: no weight of a linear product matches target \"*.attention.*\"": {"--lora", "r=2,alpha=4,targets=*.attention.*"},
		"alpha is 0; it must be a finite number above 0":                         {"--lora", "r=2,alpha=0,targets=*"},
	} {
		got := command(tinyWith(flags...)...)
		require.Equal(t, 1, got.status, said)
		require.Contains(t, got.stderr, said)
	}
}
