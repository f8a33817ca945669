package jinja

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

var endraw = regexp.MustCompile(`\{%[-+]?\s*endraw\s*[-+]?%\}`)

// rewrite converts constructs that minijinja lacks to calls: x.strip(y) to __method(x, "strip", y),
// {"a": b} to __dict("a", b), and {% generation %} to a filter block.
func rewrite(source string) (out string, marks bool, err error) {
	var b strings.Builder
	for {
		i := strings.IndexByte(source, '{')
		if i < 0 || i+1 == len(source) {
			break
		}
		kind := source[i+1]
		if kind != '{' && kind != '%' && kind != '#' {
			b.WriteString(source[:i+1])
			source = source[i+1:]
			continue
		}
		b.WriteString(source[:i])
		source = source[i:]
		if kind == '#' {
			n := strings.Index(source, "#}")
			if n < 0 {
				return "", false, fmt.Errorf("the template: a comment has no end")
			}
			b.WriteString(source[:n+2])
			source = source[n+2:]
			continue
		}
		open := 2
		if len(source) > 2 && (source[2] == '-' || source[2] == '+') {
			open = 3
		}
		tokens, n, err := lex(source[open:], kind)
		if err != nil {
			return "", false, err
		}
		last := len(tokens) - 1
		b.WriteString(source[:open] + " ")
		body := tokens[:last]
		source = source[open+n:]
		if kind == '%' && len(body) == 1 {
			switch body[0] {
			case "generation":
				body, marks = []string{"filter", generationFilter, "(", markVariable, ")"}, true
			case "endgeneration":
				body = []string{"endfilter"}
			case "raw":
				b.WriteString("raw " + tokens[last])
				end := endraw.FindStringIndex(source)
				if end == nil {
					return "", false, fmt.Errorf("the template: raw has no endraw")
				}
				b.WriteString(source[:end[1]])
				source = source[end[1]:]
				continue
			}
		}
		b.WriteString(strings.Join(calls(body), " ") + " " + tokens[last])
	}
	b.WriteString(source)
	return b.String(), marks, nil
}

var operators = []string{"**", "//", "==", "!=", "<=", ">="}

// lex splits the inside of {{ or {% into tokens, the last of which is the closing delimiter. n
// is their length in bytes.
func lex(s string, kind byte) (tokens []string, n int, err error) {
	closing := "}}"
	if kind == '%' {
		closing = "%}"
	}
	depth := 0
	for i := 0; i < len(s); {
		rest := s[i:]
		if depth == 0 {
			for _, sign := range []string{"", "-", "+"} {
				if strings.HasPrefix(rest, sign+closing) {
					return append(tokens, sign+closing), i + len(sign) + 2, nil
				}
			}
		}
		r, size := utf8.DecodeRuneInString(rest)
		switch {
		case unicode.IsSpace(r):
			i += size
			continue
		case r == '"' || r == '\'':
			k := 1
			for k < len(rest) && rest[k] != byte(r) {
				if rest[k] == '\\' {
					k++
				}
				k++
			}
			if k >= len(rest) {
				return nil, 0, fmt.Errorf("the template: a string has no end: %s", cut(rest))
			}
			size = k + 1
		case r == '_' || unicode.IsLetter(r):
			size = wordLen(rest)
		case r >= '0' && r <= '9':
			size = wordLen(rest)
			if len(rest) > size+1 && rest[size] == '.' && rest[size+1] >= '0' && rest[size+1] <= '9' {
				size += 1 + wordLen(rest[size+1:])
			}
		case r == '{':
			depth++
		case r == '}':
			depth--
		default:
			for _, op := range operators {
				if strings.HasPrefix(rest, op) {
					size = len(op)
				}
			}
		}
		tokens = append(tokens, rest[:size])
		i += size
	}
	return nil, 0, fmt.Errorf("the template: a block has no end: %s", cut(s))
}

func wordLen(s string) int {
	n := strings.IndexFunc(s, func(r rune) bool { return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	if n < 0 {
		return len(s)
	}
	return n
}

// calls rewrites the tokens of a block.
func calls(tokens []string) (out []string) {
	var open []string // brackets, "{" for a dict
	for i, t := range tokens {
		next := func(k int) string {
			if i+k < len(tokens) {
				return tokens[i+k]
			}
			return ""
		}
		switch {
		case t == "." && methods[next(1)] && next(2) == "(":
			at := primary(out)
			out = slices.Insert(out, at, methodFunction, "(")
			out = append(out, ",", `"`+next(1)+`"`)
			if next(3) != ")" {
				out = append(out, ",")
			}
			continue
		case i > 0 && tokens[i-1] == "." && methods[t] && next(1) == "(":
			continue // written
		case t == "(" && i > 1 && tokens[i-2] == "." && methods[tokens[i-1]]:
			open = append(open, t)
			continue // written as the function's bracket
		case t == "{":
			open = append(open, t)
			out = append(out, dictFunction, "(")
			continue
		case t == "(" || t == "[":
			open = append(open, t)
		case (t == ")" || t == "]" || t == "}") && len(open) > 0:
			open = open[:len(open)-1]
			if t == "}" {
				if out[len(out)-1] == "," {
					out = out[:len(out)-1]
				}
				t = ")"
			}
		case t == ":" && len(open) > 0 && open[len(open)-1] == "{":
			t = ","
		}
		out = append(out, t)
	}
	return out
}

var keywords = map[string]bool{"in": true, "not": true, "and": true, "or": true, "if": true, "elif": true, "else": true, "is": true, "set": true, "for": true, "do": true, "call": true}

// primary returns the index of the token at which the last token's expression begins. That is
// the receiver of a method: a word, string or bracket with its attributes, calls and
// subscripts.
func primary(tokens []string) int {
	i := len(tokens) - 1
	for i >= 0 {
		switch tokens[i] {
		case ")", "]":
			depth := 0
			for ; i >= 0; i-- {
				switch tokens[i] {
				case ")", "]":
					depth++
				case "(", "[":
					depth--
				}
				if depth == 0 {
					break
				}
			}
			// A call or a subscript continues to the left.
			if i > 0 && operand(tokens[i-1]) {
				i--
				continue
			}
			return max(i, 0)
		}
		if i > 1 && tokens[i-1] == "." {
			i -= 2
			continue
		}
		return i
	}
	return 0
}

// operand says whether a token ends an expression.
func operand(t string) bool {
	if t == ")" || t == "]" {
		return true
	}
	r, _ := utf8.DecodeRuneInString(t)
	return (r == '_' || r == '"' || r == '\'' || unicode.IsLetter(r)) && !keywords[t]
}
