package model_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
)

func gpt2Size(layers, width, heads int) model.Config {
	return model.Config{Family: model.GPT2, Layers: layers, Width: width, Heads: heads, Vocab: 50257, Positions: 1024, TiedHead: true}
}

func llamaSize(layers, width, heads, kv, ffn, vocab int) model.Config {
	return model.Config{Family: model.Llama, Layers: layers, Width: width, Heads: heads, KVHeads: kv, FFN: ffn, Vocab: vocab, Positions: 4096}
}

// published has the parameters of the checkpoints on Hugging Face.
var published = []struct {
	name string
	c    model.Config
	want int64
}{
	{"gpt2", gpt2Size(12, 768, 12), 124_439_808},
	{"gpt2-medium", gpt2Size(24, 1024, 16), 354_823_168},
	{"gpt2-large", gpt2Size(36, 1280, 20), 774_030_080},
	{"gpt2-xl", gpt2Size(48, 1600, 25), 1_557_611_200},
	{"llama-2-7b", llamaSize(32, 4096, 32, 32, 11008, 32000), 6_738_415_616},
	{"llama-2-13b", llamaSize(40, 5120, 40, 40, 13824, 32000), 13_015_864_320},
	{"llama-2-70b", llamaSize(80, 8192, 64, 8, 28672, 32000), 68_976_648_192},
	{"llama-3-8b", llamaSize(32, 4096, 32, 8, 14336, 128256), 8_030_261_248},
	{"llama-3-70b", llamaSize(80, 8192, 64, 8, 28672, 128256), 70_553_706_496},
	{"llama-3.1-405b", llamaSize(126, 16384, 128, 8, 53248, 128256), 405_853_388_800},
	{"llama-3.2-1b, tied", tied(llamaSize(16, 2048, 32, 8, 8192, 128256)), 1_235_814_400},
	{"qwen2.5-7b, biases", biased(llamaSize(28, 3584, 28, 4, 18944, 152064)), 7_615_616_512},
	{"qwen2.5-0.5b, tied, biases", biased(tied(llamaSize(24, 896, 14, 2, 4864, 151936))), 494_032_768},
}

func tied(c model.Config) model.Config   { c.TiedHead = true; return c }
func biased(c model.Config) model.Config { c.QKVBias = true; return c }

func TestParameterCountsArePublished(t *testing.T) {
	for _, m := range published {
		for _, kind := range []model.Kind{model.Train, model.Eval, model.Generate} {
			p, err := model.Build(m.c, kind, 1, 1024)
			require.NoError(t, err, m.name)
			require.Equal(t, m.want, p.ParamElems(), m.name)
			if kind == model.Train {
				q, err := graph.Differentiate(p)
				require.NoError(t, err, m.name)
				var grads int64
				for _, pr := range q.Params {
					grads += q.Buf(pr.Grad).Elems()
				}
				require.Equal(t, m.want, grads, m.name)
			}
		}
	}
}
