import time
def test_x(simulated_run):
    t=time.time()
    run=simulated_run(sampling=["greedy","sampled"])
    print(time.time()-t, run, run.table("tokens").height, run.table("splits"))
    import specnb.equivalence as e, numpy as np
    t=time.time()
    print(e.judge_equivalence(run, arm="draft", rng=np.random.default_rng(0)))
    print(e.greedy_table(run)); print(time.time()-t)
    for k in [dict(diverge_rate=.2),dict(diverge_rate=.2,diverge_margin=1e-3/2), dict(unstable_rate=.3,unstable_margin=0.0), dict(wrong_law=.3,sampling=["sampled"]),dict(no_drafts=True),dict(truncate=.5),dict(corrupt_rate=.2,lengths=["long"]),dict(score=.9,score_drop=.5),dict(prompt_token_shift=1),dict(cached_tokens=20)]:
        print(k, e.judge_equivalence(simulated_run(**k), arm="draft", rng=np.random.default_rng(0)))
    print(e.sampled_tests(simulated_run(wrong_law=.3,sampling=["sampled"]), arm="draft", rng=np.random.default_rng(0)))
