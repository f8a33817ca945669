package token

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/internal/regular"
)

// Files of a Hugging Face model folder that describe the special tokens and the template.
const (
	tokenizerFile     = "tokenizer.json"
	tokenizerConfig   = "tokenizer_config.json"
	generationConfig  = "generation_config.json"
	modelConfig       = "config.json"
	specialTokensMap  = "special_tokens_map.json"
	chatTemplateFile  = "chat_template.jinja"
	maxBesideBytes    = 64 << 20
	defaultChatFormat = "default" // name of the used template in a list
)

// idKeys are the keys of config.json and generation_config.json that hold token ids.
var idKeys = []string{"bos_token_id", "eos_token_id", "pad_token_id"}

// SpecialsOf returns a tokenizer's special tokens.
func SpecialsOf(tok Tokenizer) Specials {
	if t, ok := tok.(*bpeTokenizer); ok {
		return t.specials
	}
	s := Specials{BOS: -1, Pad: -1}
	if eot := tok.EOT(); eot >= 0 {
		s.Ends = []int32{eot}
	}
	return s
}

// readBeside returns a function that reads the small files of path's folder. The files
// beside a tokenizer that is not called tokenizer.json belong to another one.
func readBeside(path string) func(name string) ([]byte, error) {
	if filepath.Base(path) != tokenizerFile {
		return nil
	}
	return func(name string) ([]byte, error) {
		return regular.ReadFile(filepath.Join(filepath.Dir(path), name), maxBesideBytes)
	}
}

// beside holds the contents of the other files in the folder of a tokenizer.json.
type beside struct {
	tokenizer, special map[string]json.RawMessage // tokenizer_config.json, special_tokens_map.json
	generation, model  map[string]json.RawMessage
	template           string // of chat_template.jinja
}

func parseBeside(read func(name string) ([]byte, error)) (b beside, err error) {
	text := func(name string) []byte {
		if err != nil || read == nil {
			return nil
		}
		var content []byte
		if content, err = read(name); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return content
	}
	object := func(name string) (o map[string]json.RawMessage) {
		if content := text(name); err == nil && content != nil {
			if json.Unmarshal(content, &o) != nil {
				err = fmt.Errorf("%s beside it is not a JSON object; repair it, or remove it", name)
			}
		}
		return o
	}
	b = beside{object(tokenizerConfig), object(specialTokensMap), object(generationConfig), object(modelConfig), string(text(chatTemplateFile))}
	return b, err
}

// given says whether an object has a key whose value is not null.
func given(o map[string]json.RawMessage, key string) bool {
	return len(o[key]) > 0 && !bytes.Equal(o[key], []byte("null"))
}

// moreAdded appends the tokens of added_tokens_decoder that tokenizer.json lacks.
func (b *beside) moreAdded(list []hfAdded, notes *[]string) ([]hfAdded, error) {
	if !given(b.tokenizer, "added_tokens_decoder") {
		return list, nil
	}
	var more map[string]hfAdded
	if err := json.Unmarshal(b.tokenizer["added_tokens_decoder"], &more); err != nil {
		return nil, fmt.Errorf("%s: added_tokens_decoder must be an object of tokens by id", tokenizerConfig)
	}
	contents, ids := map[string]int64{}, map[int64]string{}
	for _, a := range list {
		if a.ID != nil && a.Content != nil {
			contents[*a.Content], ids[*a.ID] = *a.ID, *a.Content
		}
	}
	var extra []hfAdded
	for key, a := range more {
		id, err := strconv.ParseInt(key, 10, 64)
		if err != nil || a.Content == nil {
			return nil, fmt.Errorf("%s: added_tokens_decoder has %.80q; it must be an id with a content", tokenizerConfig, key)
		}
		a.ID = &id
		known, sameContent := contents[*a.Content]
		other, sameID := ids[id]
		switch {
		case sameContent && known != id:
			*notes = append(*notes, fmt.Sprintf("%s gives token %q the id %d, but %s gives it %d, which is used", tokenizerConfig, *a.Content, id, tokenizerFile, known))
		case sameID && other != *a.Content:
			*notes = append(*notes, fmt.Sprintf("%s calls token %d %q, but %s calls it %q, which is used", tokenizerConfig, id, *a.Content, tokenizerFile, other))
		case !sameContent:
			extra = append(extra, a)
		}
	}
	slices.SortFunc(extra, func(a, b hfAdded) int { return int(*a.ID - *b.ID) })
	slices.Sort(*notes)
	return append(list, extra...), nil
}

// named reads the named tokens (bos_token, …) of both tokenizer files: text, or an
// object with the text as content.
func (b *beside) named(notes *[]string) (map[string]string, error) {
	names := map[string]string{}
	for _, file := range []struct {
		name string
		o    map[string]json.RawMessage
	}{{tokenizerConfig, b.tokenizer}, {specialTokensMap, b.special}} {
		for _, key := range slices.Sorted(maps.Keys(file.o)) {
			if !strings.HasSuffix(key, "_token") || strings.HasPrefix(key, "add_") || !given(file.o, key) {
				continue
			}
			var content struct{ Content *string }
			var text string
			if json.Unmarshal(file.o[key], &text) != nil {
				if json.Unmarshal(file.o[key], &content) != nil || content.Content == nil {
					continue // a setting, such as clean_up_token: true
				}
				text = *content.Content
			}
			if first, ok := names[key]; ok && first != text {
				*notes = append(*notes, fmt.Sprintf("%s is %q in %s and %q in %s; the first is used", key, first, tokenizerConfig, text, file.name))
				continue
			}
			names[key] = text
		}
	}
	return names, nil
}

// tokenIDs reads an id or a list of ids. Negative ids mean none.
func tokenIDs(file string, o map[string]json.RawMessage, key string) (ids []int64, err error) {
	if !given(o, key) {
		return nil, nil
	}
	var one int64
	if json.Unmarshal(o[key], &one) == nil {
		ids = []int64{one}
	} else if json.Unmarshal(o[key], &ids) != nil {
		return nil, fmt.Errorf("%s: %s must be a token id or a list of ids (got %.80s)", file, key, o[key])
	}
	return slices.DeleteFunc(ids, func(id int64) bool { return id < 0 }), nil
}

// chatTemplate returns the template of chat_template.jinja, otherwise that of
// tokenizer_config.json: text, or the "default" one of a list of named templates.
func (b *beside) chatTemplate() (string, error) {
	if b.template != "" || !given(b.tokenizer, "chat_template") {
		return b.template, nil
	}
	var text string
	if json.Unmarshal(b.tokenizer["chat_template"], &text) == nil {
		return text, nil
	}
	var list []struct{ Name, Template string }
	if err := json.Unmarshal(b.tokenizer["chat_template"], &list); err != nil {
		return "", fmt.Errorf("%s: chat_template must be text, or a list of objects with name and template", tokenizerConfig)
	}
	for _, t := range list {
		if t.Name == defaultChatFormat {
			return t.Template, nil
		}
	}
	return "", nil
}

// setSpecials finds the special tokens. added holds the id of each added token, special those that
// are marked as special.
//
// The tokenizer's eos_token ends documents. Generation stops at it and at the ids of
// generation_config.json, or, if that has none, of config.json. Without any of them the names of
// known models are used.
func (t *bpeTokenizer) setSpecials(b *beside, vocab, added, special map[string]int32, notes []string) error {
	s := Specials{BOS: -1, Pad: -1, IDs: map[string]json.RawMessage{}, Notes: notes}
	var err error
	if s.Names, err = b.named(&s.Notes); err != nil {
		return err
	}
	if s.Template, err = b.chatTemplate(); err != nil {
		return err
	}
	for _, key := range idKeys {
		if given(b.model, key) {
			s.IDs[key] = b.model[key]
		}
	}
	ids := map[string]int32{} // of named tokens
	for _, key := range slices.Sorted(maps.Keys(s.Names)) {
		id, ok := added[s.Names[key]]
		if !ok {
			id, ok = vocab[s.Names[key]]
		}
		if !ok {
			s.Notes = append(s.Notes, fmt.Sprintf("%s %q is no token of %s; it is ignored", key, s.Names[key], tokenizerFile))
			delete(s.Names, key)
			continue
		}
		ids[key] = id
	}
	isSpecial := map[int32]bool{}
	for _, set := range []map[string]int32{added, ids} {
		for _, id := range set {
			isSpecial[id] = true
		}
	}
	for _, key := range idKeys {
		list, err := t.modelIDs(b, key, isSpecial, &s.Notes)
		if err != nil {
			return err
		}
		name := strings.TrimSuffix(key, "_id")
		if id, ok := ids[name]; ok {
			if len(list) > 0 && !slices.Contains(list, id) {
				outcome := name + " is used"
				if key == "eos_token_id" {
					outcome = "generation stops at each"
				}
				s.Notes = append(s.Notes, fmt.Sprintf("%s is %q (token %d), but the model's %s is %v; %s", name, s.Names[name], id, key, list, outcome))
			}
			list = append([]int32{id}, slices.DeleteFunc(list, func(other int32) bool { return other == id })...)
		}
		switch {
		case len(list) == 0:
		case key == "bos_token_id":
			s.BOS = list[0]
		case key == "pad_token_id":
			s.Pad = list[0]
		default:
			s.Ends = list
		}
	}
	if len(s.Ends) == 0 {
		if id := byName(special); id >= 0 {
			s.Ends = []int32{id}
		}
	}
	if len(s.Ends) > 0 {
		t.eot = s.Ends[0]
	}
	t.startToken(b, &s)
	t.specials = s
	return nil
}

// modelIDs returns the ids of a key of generation_config.json, otherwise of config.json. Ids that
// are not special tokens are left out: transformers writes its defaults there for any tokenizer.
func (t *bpeTokenizer) modelIDs(b *beside, key string, isSpecial map[int32]bool, notes *[]string) (found []int32, err error) {
	for _, file := range []struct {
		name string
		o    map[string]json.RawMessage
	}{{generationConfig, b.generation}, {modelConfig, b.model}} {
		ids, err := tokenIDs(file.name, file.o, key)
		if err != nil {
			return nil, err
		}
		var use []int32
		for _, id := range ids {
			switch {
			case id >= int64(len(t.model.tokens)):
				*notes = append(*notes, fmt.Sprintf("%s names token %d as %s, but %s has %d tokens; it is ignored", file.name, id, key, tokenizerFile, len(t.model.tokens)))
			case !isSpecial[int32(id)]:
				*notes = append(*notes, fmt.Sprintf("%s names token %d as %s, but that is %.80q, which is not a special token; it is ignored", file.name, id, key, t.model.tokens[id]))
			case found != nil && !slices.Contains(found, int32(id)):
				*notes = append(*notes, fmt.Sprintf("%s names token %d as %s, but %s names %v, which is used", file.name, id, key, generationConfig, found))
			default:
				use = append(use, int32(id))
			}
		}
		if found == nil {
			found = use
		}
	}
	return found, nil
}

// startToken applies add_bos_token. It is for tokenizer classes that build their own
// post_processor; others have the start token in tokenizer.json.
func (t *bpeTokenizer) startToken(b *beside, s *Specials) {
	var class string
	if json.Unmarshal(b.tokenizer["tokenizer_class"], &class) != nil || s.BOS < 0 {
		return
	}
	if !strings.HasPrefix(class, "Llama") && !strings.HasPrefix(class, "Gemma") && !strings.HasPrefix(class, "CodeLlama") {
		return
	}
	add := true
	if given(b.tokenizer, "add_bos_token") && json.Unmarshal(b.tokenizer["add_bos_token"], &add) != nil {
		return
	}
	t.before = nil
	if add {
		t.before = []int32{s.BOS}
	}
}

// eotNames are the end-of-document tokens of known models, for a tokenizer.json without
// files that name the end token.
var eotNames = []string{"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>"}

func byName(special map[string]int32) int32 {
	for _, name := range eotNames {
		if id, ok := special[name]; ok {
			return id
		}
	}
	return -1
}
