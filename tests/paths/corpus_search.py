"""Programs that decide by data: decoding, search, detection, retrieval, geometry, trees and parsers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.paths.corpus import integers, normal, program, several, sometimes

# ------------------------------------------------------------------------------------------------------------ decoding


@program(normal(6, 4))
def ctc_greedy(logits):
    out, last = [], -1
    for t in range(logits.shape[0]):
        best = int(logits[t].argmax())
        if best != last and best != 0:
            out.append(best)
        last = best
    return out


@program(normal(4, 3))
def ctc_prefix_scores(logits):
    """Two prefixes: the empty one and that of class 1."""
    p = logits.softmax(-1)
    blank, label = torch.ones(()), torch.zeros(())
    for t in range(4):
        stay, grow = (blank + label) * p[t, 0], (blank + label) * p[t, 1]
        if grow > stay:
            label = grow
        else:
            blank = stay
        if blank + label < 1e-2:
            break
    return blank, label


@program(several(normal(3, 4), normal(4, 4), normal(4, 3)))
def rnnt_greedy(encoded, joint, predict):
    hidden, out = torch.zeros(4), []
    for t in range(3):
        for _ in range(2):
            scores = (encoded[t] + hidden) @ predict
            k = scores.argmax().item()
            if k == 0:
                break
            out.append(k)
            hidden = torch.tanh(joint[k] + hidden)
    return out, hidden


@program(normal(4, 5))
def nucleus(logits):
    saved = []
    for row in logits:
        p, order = row.softmax(-1).sort(descending=True)
        n = int((p.cumsum(0) < 0.8).sum()) + 1
        saved.append(order[:n])
    return [k.shape[0] for k in saved], saved[0]


@program(normal(6))
def temperature_until_peaked(logits):
    temperature = 1.0
    while (logits / temperature).softmax(-1).max() < 0.6 and temperature > 0.2:
        temperature -= 0.2
    return (logits / temperature).softmax(-1), temperature


@program(normal(3, 6))
def sampled_tokens(logits):
    out = []
    for t in range(3):
        token = torch.multinomial(logits[t].softmax(-1), 1)
        out.append(token)
        if token.item() >= 4:
            break
    return torch.cat(out)


@program(several(normal(3, 5), normal(3, 5)))
def speculative_with_rejection(draft, target):
    accepted = []
    for t in range(3):
        p, q = target[t].softmax(-1), draft[t].softmax(-1)
        token = torch.multinomial(q, 1)[0]
        if torch.rand(()) < (p[token] / q[token]).clamp(max=1):
            accepted.append(token)
            continue
        left = (p - q).clamp(min=0)
        accepted.append(torch.multinomial(left / left.sum(), 1)[0])
        break
    return torch.stack(accepted)


@program(several(normal(3, 4), integers(0, 4, 3)))
def repetition_penalty(logits, seen):
    for token in set(seen.tolist()):
        if logits[0, token] > 0:
            logits[0, token] /= 1.2
        else:
            logits[0, token] *= 1.2
    return logits


@program(integers(0, 5, 6))
def stop_sequence(tokens):
    stop = [1, 2]
    listed = tokens.tolist()
    for i in range(len(listed) - 1):
        if listed[i : i + 2] == stop:
            return tokens[:i]
    return tokens


@program(integers(0, 2, 3, 5))
def unfinished_rows(finished):
    unfinished, steps = torch.ones(3, dtype=torch.long), 0
    for t in range(5):
        unfinished = unfinished.mul((finished[:, t] == 0).long())
        steps += 1
        if unfinished.max() == 0:
            break
    return unfinished, steps


@program(several(normal(3, 4), integers(1, 4, 3)))
def batched_beams(scores, width):
    out = []
    for i, k in enumerate(width.tolist()):
        values, places = scores[i].topk(k)
        out.append((values.sum(), places))
    return out


@program(normal(5, 3))
def viterbi(emissions):
    score, back = emissions[0], []
    for t in range(1, 5):
        best = (score[:, None] + emissions[t][None]).max(0)
        score = best.values
        back.append(best.indices)
    path = [int(score.argmax())]
    for pointers in reversed(back):
        path.append(pointers[path[-1]].item())
    return path[::-1]


@program(several(integers(0, 3, 4), integers(0, 3, 4)))
def edit_distance(a, b):
    row = list(range(5))
    for i, x in enumerate(a.tolist(), 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b.tolist(), 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


# ----------------------------------------------------------------------------------------------- detection and geometry


@program(normal(2, 2))
def score_threshold(scores):
    keep = scores.max(-1).values > 1
    if not keep.any():
        return scores[:0]
    return scores[keep]


@program(normal(4, 4))
def boxes_per_class(scores):
    labels, out = scores.argmax(-1), {}
    for c in labels.unique().tolist():
        out[c] = scores[labels == c].mean(0)
    return out


@program(several(normal(5, 2), normal(3, 2)))
def k_means_with_empty_clusters(points, centres):
    for _ in range(2):
        near = torch.cdist(points, centres).argmin(1)
        moved = []
        for k in range(3):
            members = points[near == k]
            moved.append(members.mean(0) if len(members) > 0 else centres[k])
        new = torch.stack(moved)
        if torch.allclose(new, centres, atol=0.1):
            break
        centres = new
    return centres


@program(normal(8, 3))
def farthest_points(points):
    chosen = [0]
    distance = (points - points[0]).norm(dim=1)
    while len(chosen) < 4:
        i = int(distance.argmax())
        if distance[i] < 1.9:
            break
        chosen.append(i)
        distance = torch.minimum(distance, (points - points[i]).norm(dim=1))
    return chosen


@program(several(normal(6, 3), normal(3)))
def ball_query(points, centre):
    near = ((points - centre).norm(dim=1) < 1.5).nonzero().squeeze(1)
    if near.numel() == 0:
        near = (points - centre).norm(dim=1).argmin().reshape(1)
    return points[near].max(0).values


@program(several(normal(4, 3), normal(4, 3)))
def ransac(a, b):
    best, inliers = None, -1
    for i in range(3):
        shift = b[i] - a[i]
        count = ((a + shift - b).norm(dim=1) < 1.5).sum().item()
        if count > inliers:
            best, inliers = shift, count
    return best, inliers


@program(several(normal(3, 3), normal(3)))
def iterative_closest(a, t):
    for i in range(4):
        moved = a + t
        error = moved.mean(0)
        t = t - error * 0.7
        if error.norm() < 0.2:
            return t, i
    return t, None


@program(normal(6, 3))
def voxels(points):
    cells, inverse = torch.unique(points.round().int(), dim=0, return_inverse=True)
    if len(cells) == len(points):
        return points
    return torch.zeros(len(cells), 3).index_add_(0, inverse, points)


@program(several(normal(4, 4), normal(4)))
def jacobi(a, b):
    a = a + 6 * torch.eye(4)
    x, d = torch.zeros(4), a.diagonal()
    for i in range(12):
        new = (b - (a @ x - d * x)) / d
        if (new - x).abs().max().item() < 1e-3:
            return new, i
        x = new
    return x, -1


@program(normal(3, 3))
def power_iteration(a):
    a = a @ a.t()
    v, last = torch.ones(3) / math.sqrt(3), 0.0
    for _ in range(10):
        w = a @ v
        value = w.norm()
        if abs(value - last) < 0.05:
            break
        v, last = w / value, value
    return v, value


@program(normal(3, 3))
def pivoted_elimination(a):
    for k in range(3):
        p = k + int(a[k:, k].abs().argmax())
        if p != k:
            a[[k, p]] = a[[p, k]]
        if a[k, k] == 0:
            return None
        a[k + 1 :] -= a[k + 1 :, k : k + 1] / a[k, k] * a[k]
    return a.diagonal().prod()


# ---------------------------------------------------------------------------------------------------------- solvers


@program(normal(2, scale=2.0))
def runge_kutta_with_error_control(y):
    t, h, steps = 0.0, 0.25, 0
    while t < 1.0 and steps < 12:
        h = min(h, 1.0 - t)
        k1 = -y * y.abs()
        k2 = -(y + h * k1) * (y + h * k1).abs()
        error = float((h * (k2 - k1) / 2).abs().max())
        steps += 1
        if error > 0.2:
            h *= 0.5
            continue
        y, t = y + h * (k1 + k2) / 2, t + h
        if error < 0.02:
            h *= 2
    return y, steps


@program(normal(1, scale=2.0))
def bisection(c):
    low, high = torch.full((1,), -3.0), torch.full((1,), 3.0)
    for _ in range(5):
        middle = (low + high) / 2
        if middle**3 - c > 0:
            high = middle
        else:
            low = middle
    return low, high


@program(normal(3, scale=3.0))
def fixed_point(x):
    z, i = torch.zeros(3), 0
    while i < 8:
        new = torch.tanh(z * 0.5 + x)
        done = torch.allclose(new, z, atol=1e-1)
        z, i = new, i + 1
        if done:
            break
    return z, i


@program(normal(4, grad=True))
def armijo(x):
    f = (x**2 * torch.arange(1.0, 5)).sum() + x.sin().sum()
    (g,) = torch.autograd.grad(f, x)
    t = 1.0
    with torch.no_grad():
        while ((x - t * g) ** 2 * torch.arange(1.0, 5)).sum() + (x - t * g).sin().sum() > f - 0.9 * t * (
            g @ g
        ) and t > 0.01:
            t /= 2
    return x.detach() - t * g, t


@program(normal(5))
def event_in_a_simulation(v):
    height, velocity, bounces = v[0].abs() + 0.2, v[1], 0
    for _ in range(6):
        velocity = velocity - 0.3
        height = height + velocity * 0.5
        if height <= 0:
            height, velocity, bounces = -height, -velocity * 0.8, bounces + 1
    return height, velocity, bounces


# ------------------------------------------------------------------------------------------------- trees and parsers


@program(several(normal(7), normal(3)))
def decision_tree(thresholds, x):
    node = 0
    while node < 3:
        node = 2 * node + (1 if x[node % 3] < thresholds[node] else 2)
    return thresholds[node], node


@program(several(normal(5, 4), integers(0, 2, 5), normal(8, 4)))
def shift_reduce(words, actions, w):
    stack, buffer = [], list(words)
    for action in actions.tolist():
        if action == 0 and buffer:
            stack.append(buffer.pop(0))
        elif len(stack) >= 2:
            right, left = stack.pop(), stack.pop()
            stack.append(torch.tanh(torch.cat([left, right]) @ w))
    return stack[-1] if stack else None


@program(several(integers(-1, 3, 5), normal(5, 2)))
def tree_sums(parents, values):
    totals = [v for v in values]
    for i in range(4, 0, -1):
        p = int(parents[i])
        if 0 <= p < i:
            totals[p] = totals[p] + totals[i]
    return totals


def _tree(x, depth):
    if depth == 0 or x.sum() < 0:
        return x
    half = x.shape[0] // 2
    return torch.cat([_tree(x[:half], depth - 1) * 2, _tree(x[half:], depth - 1)])


@program(normal(8))
def recursive_tree(x):
    return _tree(x, 3)


@program(integers(0, 4, 6))
def bytecode(program):
    stack = [1]
    for op in program.tolist():
        match op:
            case 0:
                stack.append(len(stack))
            case 1 if len(stack) > 1:
                stack.append(stack.pop() + stack.pop())
            case 2:
                stack.append(stack[-1] * 2)
            case _:
                stack.append(-stack.pop())
    return stack


@program(integers(0, 3, 6))
def run_lengths(x):
    runs, values = [], x.tolist()
    for v in values:
        if runs and runs[-1][0] == v:
            runs[-1][1] += 1
        else:
            runs.append([v, 1])
    return runs


@program(integers(0, 9, 5))
def sorted_by_key(x):
    return sorted(x.tolist(), key=lambda v: (v % 3, -v)), max(x.tolist(), key=lambda v: v % 4)


@program(several(integers(0, 2, 4, 4)))
def connected_components(adjacency):
    seen, count = set(), 0
    for start in range(4):
        if start in seen:
            continue
        count, pending = count + 1, [start]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            pending += [n for n in range(4) if adjacency[node, n] or adjacency[n, node]]
    return count


# ---------------------------------------------------------------------------------------------------------- retrieval


@program(several(normal(4), normal(6, 4), normal(6, 2)))
def retrieved_or_computed(query, keys, values):
    scores = F.cosine_similarity(query[None], keys)
    best = scores.max()
    if best < 0.6:
        return query[:2], None
    i = scores.argmax().item()
    return values[i], i


@program(several(normal(4), normal(6, 4)))
def top_documents_above(query, keys):
    scores = keys @ query
    results = []
    for i in scores.argsort(descending=True).tolist():
        if scores[i].item() < 0.5 or len(results) == 3:
            break
        results.append(i)
    return results


@program(integers(0, 3, 6))
def memo(x):
    known: dict = {}
    out = []
    for v in x.tolist():
        if v not in known:
            known[v] = torch.arange(v + 1.0).sum()
        out.append(known[v])
    return torch.stack(out)


@program(several(normal(4, 3), sometimes(0.5, 9.0, 4)))
def outliers_removed(x, y):
    keep = (y - y.median()).abs() <= 2 * y.std()
    if keep.all():
        return x, y
    return x[keep], y[keep]


@program(several(integers(0, 5, 3), integers(0, 5, 3)))
def lexicographic(a, b):
    if a.tolist() < b.tolist():
        return a
    return a.sum() if a.tolist() == b.tolist() else b


@program(several(integers(1, 6, 3), normal(9, 2)))
def ragged_batch(lengths, x):
    if int(lengths.sum()) > 9:
        return None
    parts = torch.split(x[: int(lengths.sum())], lengths.tolist())
    return [p.mean(0) for p in parts]


@program(several(normal(3, 4), integers(1, 5, 3)))
def packed_rows(x, lengths):
    order = lengths.argsort(descending=True, stable=True)
    sizes = [int((lengths[order] > t).sum()) for t in range(int(lengths.max()))]
    return torch.cat([x[order][:n, t] for t, n in enumerate(sizes)]), sizes


@program(several(normal(4, 5), integers(0, 2, 4, 5)))
def attention_over_what_is_there(x, mask):
    if mask.all():
        return x.softmax(-1)
    if (mask.sum(-1) == 0).any():
        x = torch.where(mask.sum(-1, keepdim=True) == 0, torch.zeros_like(x), x)
    return x.masked_fill(mask == 0, -1e9).softmax(-1)
